"""Several text encoders in the same shards, and packs of pixels and captions with sizes computed by hand."""

import io
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dit.condition_table import FIRST_FRAMES
from dit.encoders.text import TextEncoders
from dit.encoders.text_config import check_text_encoder
from dit.encoders.vae import VAE, Geometry
from dit.errors import BatchError, ConfigError, DataError
from dit.models.flux.config import FluxConfig
from dit.models.hunyuan_video.config import first_frame_and_mask
from dit.patchify import unpatchify
from energon_data.dataset import EnergonData
from energon_data.prepare.texts import text_parts
from tests.support.encoders import CLIP_WIDTH, T5_WIDTH, prepare_twice
from tests.unit.energon_data.preparations import as_file, folder_of, run
from tests.unit.energon_data.small_data import first_batch, npy, read_batches, write_dataset

PACKS = {"max_tokens_per_pack": 24, "pack_multiple_of": 1, "packing_buffer_size": 4, "shuffle_buffer": 0}
HALF = {"rtol": 2e-3, "atol": 2e-3}  # stored as float16


def spec(**changes):
    sizes = {"in_channels": 4, "context_size": T5_WIDTH, "pooled_size": CLIP_WIDTH, **changes}
    return FluxConfig(**sizes).batch_spec()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Encoders, copies of only their configurations, and data of both kinds."""
    root = prepare_twice(tmp_path_factory.mktemp("encoders"))
    for name in ("vae", "t5", "clip"):
        (root / "configs" / name).mkdir(parents=True)
        shutil.copy(root / name / "config.json", root / "configs" / name)
    return root


def online(root: Path, **changes) -> EnergonData:
    """Data with encoders that have no weights: reading must not need weights."""
    line = f"text={root}/configs/t5,pooled={root}/configs/clip"
    settings = {"online_vae": f"{root}/configs/vae", "online_text_encoder": line}
    return EnergonData(**{"path": str(root / "pixels"), **PACKS, **settings, **changes})


def first(data: EnergonData, wanted):
    data.validate(wanted, 1, 1)
    return first_batch(data, wanted)


def test_texts_of_several_encoders_are_stored_together_and_recorded(folder):
    """Training reads T5's tokens and CLIP's vector, as FLUX does, and finds the encoders in the record."""
    data = EnergonData(path=str(folder / "latents"), **PACKS)
    record = json.loads((folder / "latents" / "dataset.json").read_text())
    line = f"text={folder}/t5,pooled={folder}/clip"
    assert data.text_encoder() == record["text_encoder"] == line.replace("text=", "", 1)
    assert record["context_size"] == T5_WIDTH
    batch = first(data, spec())
    captions = [(folder / "in" / f"{key.split('-')[0]}.txt").read_text() for key in batch.keys]
    made = TextEncoders(data.text_encoder()).encode(captions)
    texts = batch.conditions["context"]
    assert texts.layout.lengths == tuple(map(len, made["text"]))
    torch.testing.assert_close(texts.values.float(), torch.cat(made["text"]), **HALF)
    torch.testing.assert_close(batch.conditions["pooled"].values, torch.stack(made["pooled"]), **HALF)
    assert batch.raw is None
    assert data.online_encoding() is None


def test_values_beyond_float16_are_stored_as_float32():
    """Middle layers of language models have such values; other texts are stored in float16."""
    parts = text_parts({"text": [torch.tensor([[1.0, 7e4]]), torch.tensor([[1.0, 6e4]])]})
    large, small = (np.load(io.BytesIO(part["text.npy"])) for part in parts)
    assert (large.dtype, small.dtype) == (np.float32, np.float16)
    assert large[0, 1] == 7e4


def test_packs_of_pixels_have_the_tokens_of_their_latents_without_any_weights(folder):
    stored = EnergonData(path=str(folder / "latents"), **PACKS)
    expected, batch = first(stored, spec()), first(online(folder), spec())
    assert (batch.keys, batch.grids, batch.layout) == (expected.keys, expected.grids, expected.layout)
    assert len(set(batch.grids)) == 2
    assert not set(batch.conditions) & {"context", "pooled"}
    vae = VAE(str(folder / "vae"))
    tokens = batch.layout.without_padding(expected.latents_TC).split(list(batch.layout.lengths))
    for key, pixels, caption, grid, rows in zip(batch.keys, batch.raw.pixels, batch.raw.captions, batch.grids, tokens):
        name = key.split("-")[0]
        picture = np.asarray(Image.open(folder / "in" / f"{name}.png")).transpose(2, 0, 1)
        assert np.array_equal(pixels[:, 0].numpy(), picture)
        assert caption == (folder / "in" / f"{name}.txt").read_text()
        latent = vae.encode(pixels[None].float() / 127.5 - 1)[0]
        torch.testing.assert_close(unpatchify(rows.float(), grid, 1, 2), latent, **HALF)
    with pytest.raises(BatchError, match="encode it first"):
        batch.to("cpu")


def test_the_identity_stores_and_sends_pixels_as_they_are(folder):
    geometry, vae = Geometry.read("identity"), VAE("identity")
    assert geometry.latent_shape(2, 8, 6) == (3, 2, 8, 6)
    pixels = torch.rand(1, 3, 2, 8, 6) * 2 - 1
    assert torch.equal(vae.encode(pixels), pixels)
    assert torch.equal(vae.decode(pixels), pixels)
    batch = first(online(folder, online_vae="identity", max_tokens_per_pack=256), spec(in_channels=3))
    assert {grid for grid in batch.grids} <= {(1, 8, 8), (1, 8, 16)}


@pytest.mark.parametrize(
    ("settings", "sizes", "fault"),
    [
        ({}, {"in_channels": 16}, "has latents of 4 channels, model.in_channels is 16"),
        ({}, {"context_size": 8}, "makes a text of 16 features, the model takes"),
        ({}, {"pooled_size": 8}, r"makes a pooled text of 12 features, the model takes \[8\]"),
        ({"online_vae": "/"}, {}, "no autoencoder at"),
        ({"online_text_encoder": "nowhere"}, {}, "is unknown"),
        ({"online_text_encoder": "text_2=identity"}, {}, "makes no condition of the model"),
        ({"online_precision": "fp16"}, {}, "online_precision='fp16'"),
    ],
)
def test_encoders_that_do_not_fit_are_refused_before_the_run(folder, settings, sizes, fault):
    with pytest.raises(ConfigError, match=fault):
        online(folder, **settings).validate(spec(**sizes), 1, 1)


def test_stored_latents_are_not_encoded_again(folder):
    data = online(folder)
    data.path = str(folder / "latents")
    with pytest.raises(ConfigError, match="encodes pixels, which have 3"):
        data.validate(spec(), 1, 1)


def test_a_sample_that_cannot_be_encoded_is_skipped_with_its_reason(folder, tmp_path):
    """Samples without picture or caption, with a size that cannot be encoded, or with a derived picture are skipped."""
    picture, odd = (folder / "in" / "0.png").read_bytes(), as_file(Image.new("RGB", (18, 16)))
    samples = [
        ("latent", {"caption": "a"}, {"latent.npy": npy(np.zeros((4, 1, 4, 4), np.float32))}),
        ("odd", {"caption": "a"}, {"pixels.png": odd}),
        ("silent", {}, {"pixels.png": picture}),
        ("derived", {"caption": "a"}, {"pixels.png": picture, "first_frames.npy": npy(np.zeros((5, 1, 4, 4)))}),
        ("sound", {"caption": "a"}, {"pixels.png": picture}),
    ]
    data = online(folder, max_lost_samples=30)
    data.path = str(write_dataset(tmp_path / "data", {"train": samples}))
    first_frames = replace(FIRST_FRAMES, shape=(5,), derive=first_frame_and_mask)
    wanted = replace(spec(), conditions=(*spec().conditions, first_frames))
    [batch], skipped = read_batches(data, wanted, 1)
    assert batch.keys[0] == "train_sound"
    assert skipped.keys() == {"missing_part", "wrong_shape", "no_caption", "wrong_part"}


def test_data_without_captions_are_refused_before_the_run(folder, tmp_path):
    data = online(folder)
    data.path = str(write_dataset(tmp_path / "data", {"train": [("a", {}, {"pixels.png": b""})]}))
    with pytest.raises(ConfigError, match="none of the first samples"):
        data.stored_conditions()
    data.path = str(folder / "pixels")
    assert {"text", "pooled", "caption"} <= set(data.stored_conditions())


def test_samples_without_a_caption_are_left_out_as_by_prepare_and_reported_before_training(folder, tmp_path):
    """They are not damaged: `data.max_lost_samples` is 0. A caption that is no text is damaged."""
    picture = {"pixels.png": (folder / "in" / "0.png").read_bytes()}
    samples = [("silent", {}, picture), ("null", {"caption": None}, picture), ("sound", {"caption": "a"}, picture)]
    data = online(folder, path=str(write_dataset(tmp_path / "data", {"train": samples})))
    batches, skipped = read_batches(data, spec(), 4)
    assert {key for batch in batches for key in batch.keys} == {"train_sound"}
    assert skipped.keys() == {"no_caption"}
    [remark] = data.remarks(spec())
    assert "2 of 3 images are dropped (no_caption), the first: it has no caption" in remark
    data.path = str(write_dataset(tmp_path / "numbers", {"train": [*samples, ("number", {"caption": 1}, picture)]}))
    with pytest.raises(DataError, match="the caption is 1, and"):
        read_batches(data, spec(), 40)


CAPTIONS = ["a red circle", "blue", "square of red left"]


@pytest.fixture(scope="module")
def several(folder) -> Path:
    """Four pictures with three captions each and two with one, all captions embedded by two encoders."""
    files = {f"{i}.png": (folder / "in" / "0.png").read_bytes() for i in range(6)}
    for i, letter in enumerate("abcdef"):
        words = [f"{letter} {caption}" for caption in CAPTIONS]
        files[f"{i}.json"] = json.dumps({"caption": words if i < 4 else words[0]})
    words = ["--multiple-of", "8", "--text-encoder", f"text={folder}/t5", "--text-encoder", f"pooled={folder}/clip"]
    assert run(folder_of(folder / "several", files), folder / "several_data", *words) == 0
    return folder / "several_data"


def read_captions(data: EnergonData, samples: int, held_out: bool = False) -> list[tuple[str, str]]:
    """Return key and caption of each sample read, and check that its embeddings belong to one of its captions."""
    known = [f"{letter} {caption}" for letter in "abcdef" for caption in CAPTIONS]
    made = TextEncoders(data.text_encoder()).encode(known)
    wanted = spec(in_channels=3)
    if held_out:
        batches = data.build_validation(wanted, dp_rank=0, dp_size=1)
    else:
        batches = data.build_train(wanted, dp_rank=0, dp_size=1, seed=4, log_dir=None)
    read = []
    for batch in batches:
        if batch.raw is not None:
            read += list(zip(batch.keys, batch.raw.captions))
        else:
            texts = batch.conditions["context"]
            rows = texts.values.split(list(texts.layout.lengths))
            pooled = batch.conditions["pooled"].values
            for key, row, vector in zip(batch.keys, rows, pooled):
                (near,) = [
                    caption
                    for caption, tokens, whole in zip(known, made["text"], made["pooled"])
                    if len(tokens) == len(row)
                    and torch.allclose(tokens, row.float(), **HALF)
                    and torch.allclose(whole, vector, **HALF)
                ]
                assert near[0] == "abcdef"[int(key[0])]
                read.append((key, near))
        if len(read) >= samples:
            break
    batches.close()
    return read[:samples]


@pytest.mark.parametrize("kind", ["stored", "online"])
def test_each_reading_draws_one_of_the_captions(folder, several, kind):
    """Training draws every caption of a sample, with both embeddings from the same one; held-out data use the first."""
    settings = {"max_tokens_per_pack": 256, "packing_buffer_size": 1, "shuffle_buffer": 0, "validation_split": "train"}
    if kind == "online":
        settings["online_text_encoder"] = f"text={folder}/t5,pooled={folder}/clip"
    data = EnergonData(path=str(several), **settings)
    read = read_captions(data, 6 * 20)
    assert read == read_captions(data, 6 * 20)
    for i in range(6):
        found = Counter(caption[2:] for key, caption in read if key[0] == str(i))
        assert sum(found.values()) == 20
        assert set(found) == (set(CAPTIONS) if i < 4 else {CAPTIONS[0]})
    drawn = Counter(caption[2:] for key, caption in read if int(key[0]) < 4)
    assert all(abs(count - 80 / 3) < 17 for count in drawn.values())  # four standard deviations
    for first_only in (read_captions(data, 6, held_out=True), read_captions(replace(data, vary_captions=False), 24)):
        assert {caption[2:] for _, caption in first_only} == {CAPTIONS[0]}


@pytest.mark.parametrize("read", [Geometry.read, check_text_encoder])
def test_an_unreachable_hub_is_reported_at_once(monkeypatch, capsys, read):
    """The error comes immediately, not after a minute of retries, and does not blame a missing config.json."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match=r"owner/model is not a local folder and .* cannot be reached \(.*refused\)"):
        read("owner/model")
    assert capsys.readouterr() == ("", "")


def test_a_folder_without_an_autoencoder_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ConfigError, match=r"has no _class_name in its config\.json"):
        Geometry.read(str(tmp_path))
