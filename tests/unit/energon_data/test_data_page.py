"""Examples of `energon_data/README.md` and `docs/data.md` run as shown; their tables match recipes and code."""

import re
import runpy
import shlex
from pathlib import Path

import fiddle
import numpy as np
import pytest
import small_data
import torch
from click.testing import CliRunner
from megatron.energon.cli.main import main as energon
from PIL import Image
from small_data import first_batch, npy, read_batches

from dit.data_api import BatchSpec
from dit.errors import DataError
from energon_data.dataset import EnergonData
from energon_data.prepare.__main__ import main as prepare_main
from energon_data.skip_log import GIVE_UP_AFTER
from launch import cli
from launch.train import resolve
from tests.support import encoders
from tests.unit.energon_data.preparations import as_file, folder_of, write_tar
from tests.unit.launch import pages
from tests.unit.launch.pages import ROOT

PAGE = Path("energon_data/README.md")
LOADER_PAGE = ROOT / "docs" / "data.md"


def spec(**changes) -> BatchSpec:
    """Return the batch spec of tiny_dit_cross."""
    values = {"patch_temporal": 1, "patch_spatial": 2, "latent_channels": 4, "num_classes": None, "context_size": 32}
    return small_data.spec(**{**values, "micro_batch_size": 1, **changes})


def command(start: str) -> list[str]:
    """Return the words of the only command of the page with this start."""
    (line,) = (line for line in pages.shown_commands(PAGE) if line.startswith(start))
    return shlex.split(line)


@pytest.fixture
def written(tmp_path, monkeypatch) -> Path:
    """Run the page's example in an empty folder, as a script."""
    (example,) = (block.text for block in pages.blocks(PAGE) if block.language == "python")
    script = tmp_path / "example.py"
    script.write_text(example)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    return tmp_path / "data" / "mine"


def test_the_example_is_read_unchanged(written):
    """Every sample of both splits is read once, with its values, grid, text and frame rate."""
    rng = np.random.default_rng(0)
    data = EnergonData(path=str(written), max_tokens_per_pack=128)
    for split, count in {"train": 60, "val": 12}.items():
        data.validation_split, data.validation_samples = split, None
        data.validate(spec(), 1, 4)
        found = {}
        for pack in data.build_validation(spec(), dp_rank=0, dp_size=1):
            assert pack.conditions["fps"].values.tolist() == [24.0] * pack.layout.num_samples
            latents = pack.latents_TC.split(pack.layout.padded_lengths)
            texts = pack.conditions["context"].values.split(pack.conditions["context"].layout.padded_lengths)
            for key, grid, latent, text in zip(pack.keys, pack.grids, latents, texts, strict=True):
                assert key not in found
                found[key] = grid, latent, text
        assert sorted(found) == [f"{split}_{i:05d}" for i in range(count)]
        for i in range(count):
            shape = [(4, 1, 16, 16), (4, 1, 8, 24), (4, 4, 8, 8)][i % 3]
            latent = torch.from_numpy(rng.standard_normal(shape).astype(np.float16)).float()
            text = torch.from_numpy(rng.standard_normal((5 + i % 4, 32)).astype(np.float16)).float()
            grid, tokens, context = found[f"{split}_{i:05d}"]
            assert tuple(grid) == (shape[1], shape[2] // 2, shape[3] // 2)
            # The patchifier sets the order inside a token; the values are the same.
            assert torch.equal(tokens.flatten().sort().values, latent.flatten().sort().values)
            assert torch.equal(context.float(), text)


def test_the_training_command_takes_the_example(written):
    words = command("python -m launch.train --yes --factory tiny_dit_cross training.run_dir=runs/mine")
    task = resolve(cli.parse(words[words.index("launch.train") + 1 :]))
    model, data = fiddle.build(task.model), fiddle.build(task.data)
    asked = spec(latent_channels=model.in_channels, num_classes=model.num_classes, context_size=model.context_size)
    assert asked == spec(micro_batch_size=task.training.micro_batch_size)
    data.validate(asked, 1, task.training.global_batch_size)
    assert (written / "dataset.json").samefile(Path(data.path) / "dataset.json")
    assert first_batch(data, asked).layout.num_samples >= 1


def red_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the folder `pictures`, with captions, in an empty folder to work in."""
    monkeypatch.chdir(folder)
    files = {f"{i}.png": as_file(Image.new("RGB", (40 + 30 * i, 50), (40 * i, 0, 0))) for i in range(6)}
    folder_of(folder / "pictures", files | {f"{i}.txt": f"red of strength {i}" for i in range(6)})


def test_user_pictures_are_prepared_by_the_command_of_the_page_and_trained_on(tmp_path, monkeypatch):
    red_pictures(tmp_path, monkeypatch)
    prepare = command("python -m energon_data.prepare images --in pictures --out data/pictures")
    assert prepare_main(prepare[prepare.index("images") :]) == 0
    pixels = "model.in_channels=3 model.context_size=384 data.max_tokens_per_pack=1024 training.micro_batch_size=1"
    words = f"--yes --factory tiny_dit_cross data=energon data.path=data/pictures {pixels}"
    task = resolve(cli.parse(words.split()))
    model, data = fiddle.build(task.model), fiddle.build(task.data)
    asked = model.batch_spec(micro_batch_size=task.training.micro_batch_size)
    data.validate(asked, 1, 4)
    seen: set[str] = set()
    for pack in read_batches(data, asked, 12)[0]:
        for latent, key in zip(pack.latents_TC.split(pack.layout.padded_lengths), pack.keys):
            red = 40 * int(key.partition("-")[0]) / 127.5 - 1
            assert torch.allclose(latent.view(len(latent), 4, 3), torch.tensor([red, -1.0, -1.0]))
            seen.add(key)
    assert len(seen) == 6


def test_pictures_are_encoded_before_and_during_training_with_the_settings_of_the_page(tmp_path, monkeypatch):
    """Small encoders are saved at the paths of the page, and the model has their widths."""
    red_pictures(tmp_path, monkeypatch)
    for place in ("vae", "flux/vae"):
        encoders.save_vae(tmp_path / "models" / place)
    for t5, clip in (("t5", "clip"), ("flux/text_encoder_2", "flux/text_encoder")):
        encoders.save_t5(tmp_path / "models" / t5)
        encoders.save_clip(tmp_path / "models" / clip)
    [settings] = re.findall(r"`(data\.online_vae=[^`]+)`", (ROOT / PAGE).read_text())
    widths = f"model.context_size={encoders.T5_WIDTH} model.pooled_size={encoders.CLIP_WIDTH}"
    words = f"--yes --factory tiny_flux data=energon data.path=data/pixels data.max_tokens_per_pack=1024 {settings}"
    task = resolve(cli.parse(f"{words} {widths}".split()))
    asked = fiddle.build(task.model).batch_spec(micro_batch_size=task.training.micro_batch_size)
    online, stored = fiddle.build(task.data), EnergonData(path="data/latents_1024")
    [texts] = re.findall(r"`(--text-encoder text=[^`]+)`", (ROOT / PAGE).read_text())
    for path, options in ((stored.path, f"--size 1024 --vae models/flux/vae {texts}"), (online.path, "--size 256")):
        assert prepare_main(["images", "--in", "pictures", "--out", path, *options.split(), "--processes", "1"]) == 0
    for data in (stored, online):
        data.validate(asked, 1, 4)
        assert {"text", "pooled"} <= set(data.stored_conditions())
        assert (first_batch(data, asked).raw is None) == (data is stored)


def test_an_existing_webdataset_is_prepared_and_each_refusal_names_its_cure(tmp_path, monkeypatch):
    """Shards are plain tar files without checksums, texts or labels: first refused, then read as the errors suggest."""
    folder = tmp_path / "data" / "theirs"
    for shard in range(4):
        parts = [{"json": b'{"caption": "x"}', "latent.npy": npy(np.full((4, 1, 8, 8), i, "f4"))} for i in range(4)]
        members = ((f"s{shard}_{i}.{name}", part[name]) for i, part in enumerate(parts) for name in part)
        write_tar(folder / f"{shard:03d}.tar", *members)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(energon, command("energon prepare")[1:])
    assert result.exit_code == 0, result.output

    def read(asked, **settings):
        return first_batch(EnergonData(path=str(folder), **settings), asked)

    with pytest.raises(DataError, match=r"set data\.require_checksums=False.*ShardWriter.*energon_data/README\.md"):
        read(spec())
    with pytest.raises(DataError, match=r"no text\.npy; store.*\[K, 32\].*model\.context_size=null.*only some samples"):
        read(spec(), require_checksums=False)
    with pytest.raises(DataError, match=r"stores no label.*model\.num_classes=null"):
        read(spec(context_size=None, num_classes=10), require_checksums=False)
    pack = read(spec(context_size=None, micro_batch_size=3), require_checksums=False)
    assert pack.layout.lengths == (16, 16, 16)


def test_the_limits_are_those_of_the_loader():
    page = LOADER_PAGE.read_text()
    assert f"`data.validation_samples` ({EnergonData().validation_samples})" in page
    assert f"{GIVE_UP_AFTER:,} in a row" in page
    reasons = set(re.findall(r"`(\w+)`", page.partition("with the reasons")[2].partition(". ")[0]))
    source = (ROOT / "energon_data" / "filters.py").read_text()
    assert len(reasons) == 7
    assert [reason for reason in reasons if f'"{reason}"' not in source] == []
