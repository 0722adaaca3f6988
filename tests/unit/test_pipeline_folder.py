"""Naming a complete diffusers pipeline where one of its networks is needed."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dit.checkpoint.reading import find_checkpoint
from dit.encoders.text_config import check_text_encoder
from dit.encoders.vae import Geometry
from dit.errors import UserError

OPENERS: dict[str, tuple[Callable[[str], object], str]] = {
    "text encoder": (check_text_encoder, "{0}/text_encoder or {0}/text_encoder_2"),
    "autoencoder": (Geometry.read, "{0}/vqvae"),
}


def pipeline(root: Path, *parts: str) -> str:
    for part in parts:
        (root / part).mkdir(parents=True)
        (root / part / "config.json").write_text("{}")
    (root / "scheduler").mkdir()
    (root / "model_index.json").write_text("{}")
    return str(root)


@pytest.mark.parametrize("opener", OPENERS)
def test_the_error_names_the_part(opener: str, tmp_path: Path) -> None:
    path = pipeline(tmp_path / "pipe", "transformer", "text_encoder", "text_encoder_2", "vqvae")
    read, parts = OPENERS[opener]
    with pytest.raises(
        UserError, match=re.escape(f"is a complete pipeline; name its part, such as {parts.format(path)}")
    ):
        read(path)


@pytest.mark.parametrize("opener", OPENERS)
def test_the_error_lists_the_parts_if_none_fits(opener: str, tmp_path: Path) -> None:
    path = pipeline(tmp_path / "pipe", "image_encoder")
    with pytest.raises(UserError, match=r"complete pipeline without a part .*; its parts are: image_encoder"):
        OPENERS[opener][0](path)


@pytest.mark.parametrize("folder", ["pipe", "pipe/transformer"])
def test_a_folder_of_diffusers_is_imported_before_it_is_a_checkpoint(tmp_path: Path, folder: str) -> None:
    pipeline(tmp_path / "pipe", "transformer")
    with pytest.raises(UserError, match=r"is a folder of diffusers, not of a run; import it with .*import_weights"):
        find_checkpoint(tmp_path / folder)


def test_the_autoencoder_of_a_pipeline_is_loaded(tmp_path: Path) -> None:
    """Its folder is `vae` in every pipeline that has one, so naming the pipeline is enough."""
    path = pipeline(tmp_path / "pipe", "vae")
    (tmp_path / "pipe" / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL", "scaling_factor": 0.5}')
    assert Geometry.read(path).std == (2.0,)
