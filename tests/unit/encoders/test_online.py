"""Packs encoded on the training device equal packs of stored latents and embeddings, sample by sample."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from dit.condition_table import FIRST_FRAMES, LOW_RESOLUTION
from dit.encoders.online import OnlineEncoders, batch_encoder, null_texts
from dit.encoders.text import TextEncoders
from dit.errors import ConfigError
from dit.models.flux.config import FluxConfig
from dit.models.hunyuan_video.config import first_frame_and_mask
from dit.resize import LowResolution
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from tests.support.encoders import CLIP_WIDTH, T5_WIDTH, prepare_twice

HALF = {"rtol": 2e-3, "atol": 2e-3}  # stored as float16
SPEC = FluxConfig(in_channels=4, context_size=T5_WIDTH, pooled_size=CLIP_WIDTH).batch_spec()
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare_twice(tmp_path_factory.mktemp("online"))


def packs(folder, kind, spec=SPEC, **settings):
    """Return the first packs of a kind of data from the loader, and the encoding."""
    own = {"max_tokens_per_pack": 24, "pad_packs": True, "packing_buffer_size": 8, "shuffle_buffer": 0, **settings}
    if kind == "pixels":
        line = f"text={folder}/t5,pooled={folder}/clip"
        own = {"online_vae": f"{folder}/vae", "online_text_encoder": line, **own}
    data = EnergonData(path=str(folder / ("pixels" if kind == "pixels" else "latents")), background=False, **own)
    stream = data.build_train(spec, dp_rank=0, dp_size=1, seed=0, log_dir=None)
    found = list(islice(stream, 2))
    stream.close()
    return found, data.online_encoding()


def encoded(folder, group, spec=SPEC, **settings):
    raw, encoding = packs(folder, "pixels", spec, **settings)
    encode = batch_encoder(encoding, spec, CPU, group, {})
    return [encode(pack).validate(spec.conditions, patch_volume=spec.patch_volume) for pack in raw]


@pytest.mark.parametrize(
    ("settings", "patch_temporal"), [({}, 1), ({"max_text_tokens": 3}, 1), ({}, 2)], ids=["plain", "cut", "two frames"]
)
def test_an_encoded_pack_equals_stored_latents_and_embeddings(folder, one_rank_world, settings, patch_temporal):
    """Texts are truncated alike; an image is encoded once and repeated to fill a patch of two frames."""
    spec = replace(SPEC, patch_temporal=patch_temporal)
    expected, _ = packs(folder, "latents", spec, **settings)
    for found, stored in zip(encoded(folder, one_rank_world.tp_cp, spec, **settings), expected, strict=True):
        assert (found.keys, found.grids, found.layout, found.raw) == (stored.keys, stored.grids, stored.layout, None)
        torch.testing.assert_close(found.latents_TC, stored.latents_TC.float(), **HALF)
        assert found.conditions.layout("context") == stored.conditions.layout("context")
        assert found.conditions.keys() == stored.conditions.keys()
        for name in ("context", "pooled"):
            torch.testing.assert_close(found.conditions[name].values, stored.conditions[name].values.float(), **HALF)
        assert found.to("cpu").latents_TC.requires_grad is False


def test_pictures_derived_from_encoded_latents_equal_those_of_stored_latents(folder, one_rank_world):
    low = replace(LOW_RESOLUTION, shape=(4,), derive=LowResolution(2))
    spec = replace(SPEC, conditions=(replace(FIRST_FRAMES, shape=(5,), derive=first_frame_and_mask), low))
    expected, _ = packs(folder, "latents", spec)
    settings = {"online_text_encoder": None}
    for found, stored in zip(encoded(folder, one_rank_world.tp_cp, spec, **settings), expected, strict=True):
        for name in ("first_frames", "low_resolution"):
            torch.testing.assert_close(found.conditions[name].values, stored.conditions[name].values, **HALF)


@pytest.mark.parametrize(
    "options", ["max_tokens=9:zero_padded", "max_tokens=9:padded_once", "prompt=lower_case:max_tokens=9:padded"]
)
def test_stored_padding_has_the_lengths_of_encoded_texts(folder, one_rank_world, options):
    line = f"{folder}/t5:{options}"
    spec = replace(SPEC, conditions=tuple(c for c in SPEC.conditions if c.name != "pooled"))
    raw, encoding = packs(folder, "pixels", spec, online_text_encoder=line)
    encode, encoders = OnlineEncoders(encoding, spec, CPU, one_rank_world.tp_cp), TextEncoders(line)
    for pack in raw:
        texts = encoders.encode(pack.raw.captions)["text"]
        expected, lengths = torch.cat(texts), [len(text) for text in texts]
        found = encode(pack).conditions
        assert list(found.layout("context").lengths) == lengths
        assert (set(lengths) == {9}) != ("padded_once" in options)
        torch.testing.assert_close(found["context"].values[: len(expected)], expected)


def test_appended_texts_are_truncated_together(folder, one_rank_world):
    """A stored text has the tokens of all encoders, so `data.max_text_tokens` limits their sum."""
    line = f"text={folder}/t5,text={folder}/t5:appended"
    spec = replace(SPEC, conditions=tuple(c for c in SPEC.conditions if c.name != "pooled"))
    raw, encoding = packs(folder, "pixels", spec, online_text_encoder=line, max_text_tokens=3)
    encode, encoders = OnlineEncoders(encoding, spec, CPU, one_rank_world.tp_cp), TextEncoders(line)
    for pack in raw:
        expected = torch.cat([text[:3] for text in encoders.encode(pack.raw.captions)["text"]])
        torch.testing.assert_close(encode(pack).conditions["context"].values, expected)


def test_one_part_is_encoded_while_the_other_is_stored(folder, one_rank_world):
    """Captions are encoded with stored latents, and pixels with stored embeddings that are not in the pixels' data."""
    texts, encoding = packs(folder, "latents", online_text_encoder=f"text={folder}/t5,pooled={folder}/clip")
    both = encoded(folder, one_rank_world.tp_cp)
    encode = OnlineEncoders(encoding, SPEC, CPU, one_rank_world.tp_cp)
    for found, expected in zip(map(encode, texts), both, strict=True):
        torch.testing.assert_close(found.latents_TC, expected.latents_TC, **HALF)
        assert torch.equal(found.conditions["context"].values, expected.conditions["context"].values)
    pictures, encoding = packs(folder, "pixels", replace(SPEC, conditions=()), online_text_encoder=None)
    encode = OnlineEncoders(encoding, SPEC, CPU, one_rank_world.tp_cp)
    for found, expected in zip(map(encode, pictures), both, strict=True):
        assert torch.equal(found.latents_TC, expected.latents_TC)


def test_encoders_run_in_the_precision_that_is_set(folder, one_rank_world):
    exact = encoded(folder, one_rank_world.tp_cp)
    rounded = encoded(folder, one_rank_world.tp_cp, online_precision="bf16")
    for a, b in zip(exact, rounded, strict=True):
        for x, y in ((a.latents_TC, b.latents_TC), (a.conditions["context"].values, b.conditions["context"].values)):
            assert y.dtype == torch.float32
            torch.testing.assert_close(y, x, rtol=0.1, atol=0.1)
            assert not torch.equal(x, y)


def test_an_encoder_of_an_unused_entry_is_not_loaded(folder, one_rank_world):
    spec = replace(SPEC, conditions=tuple(c for c in SPEC.conditions if c.name != "pooled"))
    _, encoding = packs(folder, "pixels")
    assert [encoder.config.makes for encoder in OnlineEncoders(encoding, spec, CPU, one_rank_world.tp_cp).texts] == [
        ("text",)
    ]


@pytest.mark.parametrize("kind", ["pixels", "latents"])
def test_every_pack_has_the_empty_text_of_the_data_encoder(folder, one_rank_world, kind):
    conditions = tuple(replace(c, null="empty text") if c.name == "context" else c for c in SPEC.conditions)
    spec, line = replace(SPEC, conditions=conditions), f"text={folder}/t5"
    settings = {"online_text_encoder": line} if kind == "pixels" else {}
    nulls = null_texts(EnergonData(path=str(folder / kind), **settings), conditions, CPU)
    [expected] = TextEncoders(line).encode([""])["text"]
    raw, encoding = packs(folder, kind, spec)
    for pack in raw:
        found = batch_encoder(encoding, spec, CPU, one_rank_world.tp_cp, nulls)(pack)
        assert torch.equal(found.conditions["context"].null, expected)
        assert found.conditions["pooled"].null is None
    assert torch.equal(null_texts(MockData(), conditions, CPU)["context"], torch.zeros(1, T5_WIDTH))
    assert null_texts(MockData(), SPEC.conditions, CPU) == {}


def test_data_without_an_encoder_cannot_train_a_model_that_reads_the_empty_text(folder):
    conditions = (replace(SPEC.condition("context"), null="empty text"),)
    with pytest.raises(ConfigError, match="its text encoder is unknown; prepare the data"):
        null_texts(EnergonData(path=str(folder / "pixels")), conditions, CPU)
    with pytest.raises(ConfigError, match="makes no context"):
        null_texts(EnergonData(path="", online_text_encoder=f"pooled={folder}/clip"), conditions, CPU)
