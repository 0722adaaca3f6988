"""Pairs of pictures before and after an edit, prepared from folders, lists and tables, and read by training."""

import io
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from preparations import as_file, folder_of, noise, run, samples, write_list
from pyarrow import parquet
from small_data import read_batches
from torch import Tensor

from dit.batch import pixel_values
from dit.condition_table import CONTROL
from dit.data_api import BatchSpec
from dit.encoders.text import TextEncoders
from dit.encoders.vae import VAE
from dit.errors import EXIT_CONFIG, EXIT_OK
from dit.models.flux.config import FluxConfig
from dit.patchify import unpatchify
from energon_data.cookers import read_condition
from energon_data.dataset import EnergonData
from energon_data.media_files import pixels_of
from energon_data.prepare.media import Options
from energon_data.prepare.pictures import Fit
from energon_data.prepare.preparation import Preparation
from energon_data.samples import Clip
from tests.support.encoders import Processor, save_language_model, save_vae

SPEC = BatchSpec(patch_temporal=1, patch_spatial=4, latent_channels=3, conditions=(), micro_batch_size=1)
COUNT = 4
SIZES = {0: (16, 32), 1: (32, 16)}  # width and height


def before(i: int) -> Tensor:
    return pixel_values(pixels_of([noise(*SIZES[i % 2], seed=100 + i)]))


def after(i: int) -> Tensor:
    return pixel_values(pixels_of([noise(*SIZES[i % 2], seed=i)]))


def write_pairs(root: Path) -> tuple[Path, Path]:
    """Write `edited/i.png`, and `originals/i.bmp`, with an instruction each; one original is in a subfolder."""
    edited, originals = dict[str, bytes | str](), dict[str, bytes | str]()
    for i in range(COUNT):
        name = f"deep/{i}" if i == 3 else str(i)
        edited |= {f"{name}.png": as_file(noise(*SIZES[i % 2], seed=i)), f"{name}.txt": f"make it {i}"}
        originals[f"{name}.bmp"] = as_file(noise(*SIZES[i % 2], seed=100 + i), "BMP")
    return folder_of(root / "edited", edited), folder_of(root / "originals", originals)


def prepare(source: Path, out: Path, *words: object, command: str = "images") -> int:
    return run(source, out, "--multiple-of", "8", *map(str, words), command=command)


def pairs_of(folder: Path, **settings: object) -> list[tuple[Tensor, Tensor]]:
    """Return the samples and references, of the same size, that training reads first."""
    data = EnergonData(path=str(folder), references=True, num_streams=1, shuffle_buffer=0, **settings)
    data.validate(SPEC, 1, 1)
    pairs = []
    for batch in read_batches(data, SPEC, 3 * COUNT, seed=3)[0]:
        [grid], [length] = batch.grids, batch.layout.lengths
        sample, reference = (unpatchify(x, grid, 1, SPEC.patch_spatial) for x in batch.latents_TC[:length].chunk(2))
        pairs.append((sample, reference))
    return pairs


def numbers(pairs: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]]) -> set[int]:
    """Return the indices of the expected pairs that each pair equals in both pictures; it must equal exactly one."""
    found = set()
    for pair in pairs:
        equal = [
            all(a.shape == b.shape and torch.allclose(a, b, atol=2e-3) for a, b in zip(pair, both)) for both in expected
        ]
        assert sum(equal) == 1
        found.add(equal.index(True))
    return found


PAIRS = [(after(i), before(i)) for i in range(COUNT)]


def test_pictures_of_the_same_name_are_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Whatever the format; an edited picture without an original is skipped with a reason."""
    edited, originals = write_pairs(tmp_path)
    folder_of(edited, dict.fromkeys(["alone.png", "broken.png"], as_file(noise(16, 16))))
    folder_of(originals, {"broken.png": b"no picture"})
    assert prepare(edited, tmp_path / "out", "--reference", originals) == EXIT_OK
    said = capsys.readouterr().out
    assert "skipped, no_reference: 1; alone.png: --reference" in said
    assert "skipped, bad_image: 1; broken.png: its reference: " in said
    assert f"with a reference picture: {COUNT} samples" in said
    assert numbers(pairs_of(tmp_path / "out"), PAIRS) == set(range(COUNT))


def test_of_several_originals_of_a_stem_the_one_of_the_same_format_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Without it, the edited picture is skipped, and all of them are named."""
    edited, originals = write_pairs(tmp_path)
    for i in range(COUNT - 1):
        (originals / f"{i}.png").write_bytes(as_file(noise(*SIZES[i % 2], seed=100 + i)))
        (originals / f"{i}.webp").write_bytes(as_file(noise(16, 16), "WEBP"))
    (originals / "2.png").rename(originals / "2.tif")
    assert prepare(edited, tmp_path / "out", "--reference", originals) == EXIT_OK
    said = capsys.readouterr().out
    names = "has 2.bmp, 2.tif, 2.webp; name one of them as `reference` in a list"
    assert f"skipped, no_reference: 1; 2.png: --reference {originals} {names}" in said
    assert numbers(pairs_of(tmp_path / "out"), PAIRS) == {0, 1, 3}


def test_texts_are_encoded_with_the_picture_before_the_edit(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The encoder reads the original files, here one twice; a sample without them is skipped."""
    edited, originals = write_pairs(tmp_path)
    Processor(None).pictures.save_pretrained(save_language_model("qwen2_5_vl", tmp_path / "encoder"))
    line = f"{tmp_path}/encoder:prompt=qwen_image_edit_plus"
    words = ["--reference", originals, originals, "--text-encoder", line]
    assert prepare(edited, tmp_path / "out", *words) == EXIT_OK
    shown = [[noise(*SIZES[i % 2], seed=100 + i)] * 2 for i in range(COUNT)]
    expected = TextEncoders(line).encode([f"make it {i}" for i in range(COUNT)], shown)["text"]
    stored = [np.load(io.BytesIO(parts["text.npy"])) for *_, parts in samples(tmp_path / "out")]
    assert len(stored) == COUNT
    for array in stored:  # in another order
        assert any(array.shape == x.shape and np.array_equal(array, x.half().numpy()) for x in expected)
    capsys.readouterr()
    prepare(edited, tmp_path / "without", "--text-encoder", line)
    assert f"{COUNT} no_reference (0.png: the text encoder reads the pictures" in "".join(capsys.readouterr())


def test_references_are_the_control_pictures_of_a_model_that_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are latents of the size of their sample, with its order of tokens; the data set finds its autoencoder."""
    monkeypatch.chdir(tmp_path)
    edited, originals = write_pairs(tmp_path)
    vae = VAE(str(save_vae(tmp_path / "vae")))
    assert prepare(edited, tmp_path / "out", "--reference", originals, "--vae", "vae") == EXIT_OK
    control = FluxConfig(in_channels=4, control_channels=4).condition("control")
    spec = replace(SPEC, latent_channels=4, patch_spatial=2, conditions=(control,))
    data = EnergonData(path=str(tmp_path / "out"), num_streams=1, shuffle_buffer=0)
    data.validate(spec, 1, 1)
    assert data.autoencoder() == str(tmp_path / "vae")
    pairs = []
    for batch in read_batches(data, spec, 3 * COUNT, seed=3)[0]:
        rows = slice(batch.layout.lengths[0])
        pairs.append(
            [unpatchify(x[rows], batch.grids[0], 1, 2) for x in (batch.latents_TC, batch.conditions["control"].values)]
        )
    encoded = [tuple(vae.encode(x[None])[0] for x in pair) for pair in PAIRS]
    assert numbers(pairs, encoded) == set(range(COUNT))


def test_the_control_picture_is_the_first_reference_for_every_caption() -> None:
    parts = {f"{stem}.npy": np.full((4, 1, 2, 2), i, np.float32) for i, stem in enumerate(("reference", "reference-1"))}
    control, latent = FluxConfig(in_channels=4, control_channels=4).condition("control"), torch.zeros(4, 1, 2, 2)
    clip = Clip(__key__="a", __restore_key__=(), latent=latent, metadata={}, parts=parts, wording=1)
    assert torch.equal(read_condition(control, clip), latent)


def test_flips_and_crops_are_equal_for_both_pictures(tmp_path: Path) -> None:
    edited, originals = write_pairs(tmp_path)
    assert prepare(edited, tmp_path / "out", "--reference", originals) == EXIT_OK

    def window(x: Tensor, top: int, left: int, mirror: bool) -> Tensor:
        cut = x[..., top : top + 12, left : left + 12]
        return cut.flip(-1) if mirror else cut

    places = [(top, left, mirror) for top in range(21) for left in range(21) for mirror in (False, True)]
    expected = [
        tuple(window(x, *place) for x in pair)
        for pair in PAIRS
        for place in places
        if place[0] + 12 <= pair[0].shape[-2] and place[1] + 12 <= pair[0].shape[-1]
    ]
    found = numbers(pairs_of(tmp_path / "out", crop_size=[12, 12], flip=0.5), expected)
    assert len(found) > 2 * COUNT


def test_a_list_names_the_original_of_each_picture(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Several edits may share an original from the same folder; a picture is not its own original."""
    pictures = folder_of(tmp_path / "pictures", {f"{i}.png": as_file(noise(16, 32, seed=i)) for i in range(COUNT)})
    rows = [{"file_name": f"{i}.png", "reference": "0.png", "text": f"make it {i}"} for i in range(1, COUNT)]
    write_list(pictures, [*rows, {"file_name": "0.png", "text": "nothing"}])
    assert prepare(pictures, tmp_path / "out", "--reference", pictures) == EXIT_OK
    assert "skipped, no_reference: 1; 0.png: " in capsys.readouterr().out
    tall = [pixel_values(pixels_of([noise(16, 32, seed=i)])) for i in range(COUNT)]
    assert numbers(pairs_of(tmp_path / "out"), [(tall[i], tall[0]) for i in range(1, COUNT)]) == {0, 1, 2}


def test_further_folders_have_further_references(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A sample may lack the last pictures, but not one between others. A list names several pictures of one folder."""
    edited, originals = write_pairs(tmp_path)
    styles = folder_of(tmp_path / "styles", {f"{i}.png": as_file(noise(8, 24, seed=i)) for i in (0, 1)})
    poses = folder_of(tmp_path / "poses", {f"{i}.png": as_file(noise(24, 8, seed=i)) for i in (0, 2)})

    def shapes(out: Path) -> dict[str, list[tuple[int, ...]]]:
        """Return height and width of the references of each sample."""
        return {about["source"]: [x.shape[2:] for x in clip.references] for _, about, clip, _ in samples(out)}

    assert prepare(edited, tmp_path / "out", "--reference", originals, styles, poses) == EXIT_OK
    said = capsys.readouterr().out
    assert f"skipped, no_reference: 1; 2.png: --reference {styles} has no picture of its name" in said
    assert "with a reference picture: 3 samples" in said
    tall, wide = (32, 16), (16, 32)
    expected = {"0.png": [tall, (24, 8), (8, 24)], "1.png": [wide, (24, 8)], "deep/3.png": [wide]}
    assert shapes(tmp_path / "out") == expected
    write_list(edited, [{"file_name": "0.png", "reference": ["1.bmp", "2.bmp"]}, {"file_name": "1.png"}])
    assert prepare(edited, tmp_path / "listed", "--reference", originals) == EXIT_OK
    assert shapes(tmp_path / "listed") == {"0.png": [wide, tall], "1.png": [wide]}


def test_a_table_has_a_column_of_originals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns are those of published sets of edits on the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", tmp_path / "cache")

    def files(first: int) -> list[dict]:
        pictures = [as_file(noise(*SIZES[i % 2], seed=first + i)) for i in range(COUNT)]
        return [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(pictures)]

    columns = {"source": files(100), "target": files(0), "instruction": [f"make it {i}" for i in range(COUNT)]}
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    words = ["--image-column", "target", "--caption-column", "instruction", "--reference-column"]
    table = partial(prepare, tmp_path / "x.parquet", command="huggingface")
    assert table(tmp_path / "out", *words, "source") == EXIT_OK
    assert numbers(pairs_of(tmp_path / "out"), PAIRS) == set(range(COUNT))
    assert table(tmp_path / "wrong", *words, "source", "instruction") == EXIT_CONFIG
    columns["style"] = [None, *files(200)[1:]]
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    assert table(tmp_path / "two", *words, "source", "style") == EXIT_OK
    assert sorted(len(clip.references) for _, _, clip, _ in samples(tmp_path / "two")) == [1] + [2] * (COUNT - 1)


def test_a_changed_original_is_detected(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Unfinished work is not continued after such a change."""
    edited, originals = write_pairs(tmp_path)

    def plan() -> dict:
        options = Options(fit=Fit(multiple_of=8))
        return Preparation.of("images", edited, tmp_path / "out", options, references=[originals]).plan

    first = plan()
    assert plan() == first
    (originals / "0.bmp").write_bytes(as_file(noise(16, 16), "BMP"))
    assert plan() != first


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    edited, _ = write_pairs(tmp_path)
    assert prepare(edited, tmp_path / "out", "--reference", tmp_path / "missing") == EXIT_CONFIG
    assert "missing is not a folder; name the one with the pictures before the edit" in capsys.readouterr().err


def test_pictures_to_edit_that_are_not_read_are_reported(tmp_path: Path) -> None:
    """A model with control pictures reads them as these."""
    edited, originals = write_pairs(tmp_path)
    assert prepare(edited, tmp_path / "edits", "--reference", originals) == EXIT_OK
    assert prepare(edited, tmp_path / "plain") == EXIT_OK
    control = replace(SPEC, conditions=(replace(CONTROL, shape=(3,), stored_as=("control", "reference")),))

    def remarks(name: str, spec: BatchSpec = SPEC, **settings: bool) -> list[str]:
        return EnergonData(path=str(tmp_path / name), **settings).remarks(spec)

    [remark] = remarks("edits")
    assert "edits holds pictures to edit, which data.references=False leaves out" in remark
    assert remarks("edits", references=True) == remarks("edits", control) == remarks("plain") == []


@pytest.mark.parametrize(("words", "aspect"), [(["--size", "16", "--aspect", "square"], "square"), ([], "keep")])
def test_training_records_how_references_were_cropped(tmp_path: Path, words: list[str], aspect: str) -> None:
    """Samples without references have no such entry; members of a blend that differ give none."""
    edited, originals = write_pairs(tmp_path)
    for name, flags in (("one", words), ("two", ["--size", "16", "--aspect", "buckets", "--enlarge"])):
        assert run(edited, tmp_path / name, "--reference", str(originals), *flags) == EXIT_OK
    one, two = ({"path": str(tmp_path / name)} for name in ("one", "two"))
    assert EnergonData(**one, references=True).reference_aspect() == aspect
    assert EnergonData(**one).reference_aspect() is None
    assert EnergonData(blend=[one, two], references=True).reference_aspect() is None
