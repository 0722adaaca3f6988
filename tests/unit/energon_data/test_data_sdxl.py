"""Data of Stable Diffusion XL, from pictures to packs: two text encoders, sizes and crops."""

from pathlib import Path

import pytest
import torch
from PIL import Image, ImageOps

from dit.batch import PackedBatch
from dit.condition_table import match_conditions
from dit.data_api import BatchSpec
from dit.encoders.online import OnlineEncoders
from dit.encoders.text import TextEncoders
from dit.errors import ConfigError
from dit.models.ldm_unet.config import LDMUNetConfig
from energon_data.dataset import EnergonData
from energon_data.media_files import pixels_of
from tests.support.encoders import CLIP_TOKENS, CLIP_WIDTH, PROJECTION, SDXL_OPTIONS, SDXL_PICTURES, WORDS, prepare_sdxl
from tests.unit.energon_data.small_data import first_batch

HALF = {"rtol": 2e-3, "atol": 2e-3}  # stored as float16
CAPTIONS = {name: " ".join(WORDS[: 1 + i]) for i, name in enumerate(SDXL_PICTURES)}
SIZES = {"context_size": 2 * CLIP_WIDTH, "pooled_size": PROJECTION, "null_text": "zeros"}
SIZES |= {"block_out_channels": [16, 32], "transformer_layers": [0, 1], "head_size": 8, "norm_num_groups": 4}


def spec(channels: int = 4, **changes) -> BatchSpec:
    return LDMUNetConfig(**{**SIZES, "in_channels": channels, **changes}).batch_spec(micro_batch_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return prepare_sdxl(tmp_path_factory.mktemp("sdxl"))


def read(path: Path, of: BatchSpec, **settings) -> tuple[PackedBatch, EnergonData]:
    data = EnergonData(path=str(path), num_streams=1, bucket_by_shape=True, **settings)
    data.validate(of, 1, 1)
    return first_batch(data, of), data


def names(pack: PackedBatch) -> list[str]:
    """Return the names of the pictures; keys also have a hash."""
    return [key.rpartition("-")[0] for key in pack.keys]


def lengths(pack: PackedBatch) -> dict[str, list[int]]:
    rows = pack.conditions["size_and_crop"].values.int().tolist()
    return dict(zip(names(pack), rows, strict=True))


def test_a_pack_has_both_texts_side_by_side_and_the_true_sizes_and_crops(folder):
    pack, _ = read(folder / "joined", spec())
    assert lengths(pack) == {name: six for name, (_, _, six) in SDXL_PICTURES.items()}
    captions = [CAPTIONS[name] for name in names(pack)]
    first, second = (
        TextEncoders(f"text+pooled={folder}/{name}:{SDXL_OPTIONS}").encode(captions) for name in ("clip", "projected")
    )
    expected = torch.cat([torch.cat(first["text"]), torch.cat(second["text"])], 1)
    assert pack.conditions["context"].values.shape == (len(captions) * CLIP_TOKENS, 2 * CLIP_WIDTH)
    torch.testing.assert_close(pack.conditions["context"].values.float(), expected, **HALF)
    torch.testing.assert_close(pack.conditions["pooled"].values.float(), torch.stack(second["pooled"]), **HALF)


def test_the_recorded_crop_is_that_of_the_scaled_picture(folder):
    """The stored pixels equal a crop at these numbers, made by hand."""
    line = f"text={folder}/clip:padded,text+pooled={folder}/projected:padded:joined"
    pack, _ = read(folder / "pixels", spec(3), online_text_encoder=line)
    for i, key in enumerate(names(pack)):
        high, wide, top, left, height, width = lengths(pack)[key]
        picture = ImageOps.exif_transpose(Image.open(folder / f"in/{key}.png"))
        assert picture.size == (wide, high)
        scale = max(width / wide, height / high)
        scaled = picture.resize((round(wide * scale), round(high * scale)), Image.Resampling.LANCZOS)
        expected = pixels_of([scaled.crop((left, top, left + width, top + height))]).float() / 127.5 - 1
        tokens_TC = pack.latents_TC.view(len(pack.keys), 256, 3)[i]
        assert torch.equal(tokens_TC.T.reshape(3, 1, 16, 16), expected)


def test_online_encoders_equal_stored_embeddings(folder, one_rank_world):
    line = f"text={folder}/clip:{SDXL_OPTIONS},text+pooled={folder}/projected:{SDXL_OPTIONS}:joined"
    stored, _ = read(folder / "joined", spec())
    raw, data = read(folder / "pixels", spec(), online_vae=str(folder / "vae"), online_text_encoder=line)
    found = OnlineEncoders(data.online_encoding(), spec(), torch.device("cpu"), one_rank_world.tp_cp)(raw)
    assert found.keys == stored.keys
    assert lengths(found) == lengths(stored)
    for name in ("context", "pooled"):
        torch.testing.assert_close(found.conditions[name].values, stored.conditions[name].values.float(), **HALF)


def test_pictures_cropped_during_reading_have_their_own_sizes(folder):
    """A mirrored picture has the stored sizes."""
    line = f"text={folder}/clip:padded,text+pooled={folder}/projected:padded:joined"
    cut, _ = read(folder / "pixels", spec(3), online_text_encoder=line, crop_size=[8, 8])
    assert set(map(tuple, lengths(cut).values())) == {(64, 64, 0, 0, 64, 64)}  # 8 pixels for a position
    mirrored, _ = read(folder / "pixels", spec(3), online_text_encoder=line, flip=0.5)
    assert lengths(mirrored) == {name: six for name, (_, _, six) in SDXL_PICTURES.items()}


def test_data_of_one_encoder_name_the_one_that_is_missing(folder):
    with pytest.raises(ConfigError) as caught:
        read(folder / "first", spec())
    message = str(caught.value)
    assert f"width {CLIP_WIDTH} (of {folder}/clip:{SDXL_OPTIONS}), model.context_size is {2 * CLIP_WIDTH}" in message
    assert "the second one's features are missing: --text-encoder text=FIRST" in message
    assert "set it to" not in message
    assert f"set model.context_size to {CLIP_WIDTH}" not in message
    line = f"text={folder}/clip:{SDXL_OPTIONS}"
    with pytest.raises(ConfigError, match=r"makes a text of 12 features.*second one's features are missing"):
        read(folder / "pixels", spec(), online_vae=str(folder / "vae"), online_text_encoder=line)


def test_other_models_ignore_stored_sizes(folder):
    stored = EnergonData(path=str(folder / "joined")).stored_conditions()
    assert "size_and_crop" in stored
    wanted = [c for c in spec().conditions if c.name in ("context", "pooled")]
    assert match_conditions(wanted, stored) == []
