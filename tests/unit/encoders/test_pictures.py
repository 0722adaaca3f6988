"""Texts that are read with the picture to edit, compared with the prompt encoding of diffusers' editing pipelines."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from dit.encoders.text import TextEncoders
from dit.encoders.text_config import check_text_encoder
from dit.errors import ConfigError
from tests.support.encoders import PICTURE_MARK, Processor, byte_tokenizer, language_model, save_t5, with_types

ROUNDING = {"rtol": 1e-4, "atol": 2e-5}  # fp32
TEXTS = ["make the circle red", "remove it", ""]
SIZES = [[(60, 44)], [(31, 70)], [(60, 44)]]
"""Width and height of the pictures of each text."""
PIPELINES = {
    "edit": (diffusers.QwenImageEditPipeline, 1024 * 1024, SIZES),
    "edit plus": (diffusers.QwenImageEditPlusPipeline, 384 * 384, [[(60, 44)], [(31, 70), (60, 44)], [(60, 44)]]),
}
"""Class, pixels of a picture that the encoder reads, and sizes of the pictures."""


def save_pipeline(kind: Any, folder: Path) -> Any:
    tokenizer, network = byte_tokenizer(), language_model("qwen2_5_vl", 3)
    network.register_forward_pre_hook(with_types, with_kwargs=True)
    parts = {"text_encoder": network, "tokenizer": tokenizer, "processor": Processor(tokenizer)}
    pipeline = kind(**parts, scheduler=None, vae=None, transformer=None)
    pipeline.save_pretrained(folder)
    parts["processor"].pictures.save_pretrained(folder / "processor")
    return pipeline


def pictures(sizes: list[list[tuple[int, int]]] = SIZES) -> list[list[Image.Image]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [
            Image.fromarray(torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())
            for width, height in of_text
        ]
        for of_text in sizes
    ]


@pytest.mark.parametrize("name", PIPELINES)
@torch.no_grad()
def test_the_folder_of_a_pipeline_encodes_texts_with_pictures_as_the_pipeline(name: str, tmp_path: Path) -> None:
    (kind, area, sizes), shown_sizes = PIPELINES[name], []
    pipeline = save_pipeline(kind, tmp_path)
    encoders = TextEncoders(str(tmp_path))
    found = encoders.encode(TEXTS, pictures(sizes))["text"]
    module = __import__(kind.__module__, fromlist=["calculate_dimensions"])
    for text, several, actual in zip(TEXTS, pictures(sizes), found, strict=True):
        shown = []
        for picture in several:
            width, height, *_ = module.calculate_dimensions(area, picture.width / picture.height)
            shown.append(pipeline.image_processor.resize(picture, height, width))
        ((expected,), mask) = pipeline.encode_prompt(text, shown, device="cpu")
        assert mask is None
        torch.testing.assert_close(actual, expected, **ROUNDING)
        shown_sizes.append(shown[0].size)
    assert shown_sizes[0] == shown_sizes[2] != shown_sizes[1]
    # Tokens of a text depend on its picture.
    (without,) = encoders.encode(TEXTS[:1])["text"]
    assert len(without) < len(found[0])
    (other,) = encoders.encode(TEXTS[:1], pictures()[1:2])["text"]
    assert (other[-1] - found[0][-1]).norm() > 1e-3 * other[-1].norm()


def test_encoders_of_texts_ignore_pictures(tmp_path: Path) -> None:
    line = str(save_t5(tmp_path))
    assert not check_text_encoder(line).reads_pictures
    encoders = TextEncoders(line)
    (with_picture,), (without,) = (encoders.encode(["a red circle"], shown)["text"] for shown in (pictures()[:1], None))
    torch.testing.assert_close(with_picture, without, rtol=0, atol=0)


def test_the_mark_of_a_picture_in_a_caption_is_refused(tmp_path: Path) -> None:
    save_pipeline(diffusers.QwenImageEditPlusPipeline, tmp_path)
    with pytest.raises(ConfigError, match=r"a text has 2 tokens <\|image_pad\|> for 1 picture"):
        TextEncoders(str(tmp_path)).encode([f"a {PICTURE_MARK}"], pictures()[:1])


def test_the_prompt_of_one_picture_refuses_two(tmp_path: Path) -> None:
    save_pipeline(diffusers.QwenImageEditPipeline, tmp_path)
    with pytest.raises(ConfigError, match="this prompt reads one picture, not 2; use prompt=qwen_image_edit_plus"):
        TextEncoders(str(tmp_path)).encode(TEXTS[:1], pictures([[(60, 44), (31, 70)]]))


def test_only_qwen_vl_reads_pictures(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a t5, and prompt=qwen_image_edit reads pictures with a qwen2_5_vl"):
        check_text_encoder(f"{save_t5(tmp_path)}:prompt=qwen_image_edit")
