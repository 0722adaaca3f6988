"""A pipeline's folder as text encoder, compared with the prompt encoding of this pipeline in diffusers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from dit.encoders.text import TextEncoders
from dit.encoders.text_config import check_text_encoder
from dit.errors import ConfigError
from tests.support.encoders import (
    CLIP_WIDTH,
    PIXTRAL_CHAT,
    QWEN_CHAT,
    T5_WIDTH,
    byte_tokenizer,
    language_model,
    save_byt5,
    save_clip,
    save_t5,
)

ROUNDING = {"rtol": 1e-4, "atol": 2e-5}  # fp32: padded batches sum in another order
TEXTS = [
    "A red &amp;  circle",
    "blue",
    'signs: "open" and “closed”, "open"',
    "a red circle left of a blue square " * 20,
]
Entries = dict[str, list[Tensor]]


def rows(tokens: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the tokens of each text, without those that its mask excludes."""
    return [x if mask is None else x[m.bool()] for x, m in zip(tokens, tokens[..., 0] if mask is None else mask)]


def clip(root: Path, *, projected: bool = False) -> tuple[Any, Any]:
    folder = save_clip(root / f"clip{projected}", projected=projected)
    kind = CLIPTextModelWithProjection if projected else CLIPTextModel
    return kind.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def t5(root: Path) -> tuple[Any, Any]:
    folder = save_t5(root / "t5")
    return T5EncoderModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


T5_SIZES = {"d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 128}


def umt5(root: Path) -> tuple[Any, Any]:
    _, tokenizer = t5(root)
    torch.manual_seed(6)
    return UMT5EncoderModel(UMT5Config(d_model=T5_WIDTH, **T5_SIZES)).eval(), tokenizer


def wide_t5(root: Path) -> tuple[Any, Any]:
    """Wider than two CLIPs, as in SD3."""
    _, tokenizer = t5(root)
    torch.manual_seed(7)
    return T5EncoderModel(T5Config(d_model=2 * CLIP_WIDTH + 8, **T5_SIZES)).eval(), tokenizer


def byt5(root: Path) -> tuple[Any, Any]:
    folder = save_byt5(root / "byt5")
    return T5EncoderModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def mistral(root: Path) -> tuple[Any, Any]:
    """The pipeline calls the tokenizer as its processor, which needs torchvision."""
    return language_model("mistral3", 31), byte_tokenizer(PIXTRAL_CHAT, side="left", adds_start=True)


def of_flux(pipeline: Any, options: dict[str, Any]) -> Entries:
    tokens, pooled, _ = pipeline.encode_prompt([*TEXTS, ""], [*TEXTS, ""], device="cpu", **options)
    return {"text": list(tokens), "pooled": list(pooled)}


def of_sd3(pipeline: Any, options: dict[str, Any]) -> Entries:
    three = [[*TEXTS, ""]] * 3
    tokens, _, pooled, _ = pipeline.encode_prompt(*three, device="cpu", do_classifier_free_guidance=False, **options)
    return {"text": list(tokens), "pooled": list(pooled)}


def of_sdxl(pipeline: Any, options: dict[str, Any]) -> Entries:
    tokens, _, pooled, _ = pipeline.encode_prompt([*TEXTS, ""], device="cpu", do_classifier_free_guidance=False)
    return {"text": list(tokens), "pooled": list(pooled)}


def of_one_tensor(pipeline: Any, options: dict[str, Any]) -> Entries:
    """Return all rows: FLUX.2 stores padding, Wan zeros."""
    return {"text": list(pipeline.encode_prompt([*TEXTS, ""], device="cpu", **options)[0])}


def of_a_mask(pipeline: Any, options: dict[str, Any]) -> Entries:
    return {"text": rows(*pipeline.encode_prompt([*TEXTS, ""], device="cpu", **options))}


def of_hunyuan_video(pipeline: Any, options: dict[str, Any]) -> Entries:
    """The second encoder gets the text in quotes; most captions have none."""
    tokens, mask, shown, shown_mask = pipeline.encode_prompt([*TEXTS, ""], device="cpu", batch_size=len(TEXTS) + 1)
    assert shown_mask.sum(1).gt(0).tolist() == ['"' in text for text in [*TEXTS, ""]]
    return {"text": rows(tokens, mask), "text_2": rows(shown, shown_mask)}


def of_chroma(pipeline: Any, options: dict[str, Any]) -> Entries:
    """The rows include the padding token that the mask of the transformer selects."""
    found = pipeline.encode_prompt([*TEXTS, ""], device="cpu", do_classifier_free_guidance=False, **options)
    return {"text": rows(found[0], found[2])}


def of_a_list(pipeline: Any, options: dict[str, Any]) -> Entries:
    return {"text": pipeline.encode_prompt([*TEXTS, ""], device="cpu", **options)[0]}


def of_guidance(pipeline: Any, options: dict[str, Any]) -> Entries:
    """The texts, and the empty text as the negative one."""
    found = pipeline.encode_prompt(TEXTS, device="cpu", **options)
    return {"text": [*rows(found[0], mask_of(found)), negatives_of(found)[0]]}


def mask_of(found: tuple[Tensor, ...]) -> Tensor:
    return found[2 if found[1].is_floating_point() else 1]


def negatives_of(found: tuple[Tensor, ...]) -> list[Tensor]:
    """Return negatives: tokens, negative tokens and their masks, or tokens and mask before these of the negatives."""
    return rows(found[1 if found[1].is_floating_point() else 2], found[3])


def of_prx(pipeline: Any, options: dict[str, Any]) -> Entries:
    """Replace the pipeline's cleaning by lower case, because it also removes some words and signs."""
    pipeline.text_preprocessor.clean_text = lambda text: text.lower().strip()
    tokens, mask, negative, negative_mask = pipeline.encode_prompt(TEXTS, device="cpu")
    return {"text": [*rows(tokens, mask), rows(negative, negative_mask)[0]]}


@dataclass(frozen=True)
class Case:
    """A pipeline of diffusers: its encoders in their order, its encoding, and arguments that its call passes on."""

    kind: Any
    encoders: tuple[Callable[[Path], tuple[Any, Any]], ...]
    expected: Callable[[Any, dict[str, Any]], Entries]
    options: tuple[str, ...] = ("max_sequence_length",)
    others: dict[str, Any] = field(default_factory=dict)


def qwen3(layers: int) -> Callable[[Path], tuple[Any, Any]]:
    return lambda root: (language_model("qwen3", layers), byte_tokenizer(QWEN_CHAT))


def qwen_vl(root: Path) -> tuple[Any, Any]:
    return language_model("qwen2_5_vl", 3), byte_tokenizer()


def gemma(root: Path) -> tuple[Any, Any]:
    return language_model("gemma2", 3), byte_tokenizer(side="left", adds_start=True)


def t5gemma(root: Path) -> tuple[Any, Any]:
    tokenizer = byte_tokenizer(side="left", adds_start=True)
    tokenizer.model_max_length = 256
    return language_model("t5gemma", 3), tokenizer


HUNYUAN_VIDEO_VAE = diffusers.AutoencoderKLHunyuanVideo15(latent_channels=4, block_out_channels=(8,) * 5)
"""The pipeline reads its number of channels."""


def qwen_vl_text(root: Path) -> tuple[Any, Any]:
    """Without the network for pictures, as in the published HunyuanVideo 1.5."""
    return language_model("qwen2_5_vl", 4).model.language_model, byte_tokenizer(QWEN_CHAT)


def projected_clip(root: Path) -> tuple[Any, Any]:
    return clip(root, projected=True)


CASES = {
    "flux": Case(diffusers.FluxPipeline, (clip, t5), of_flux),
    "chroma": Case(diffusers.ChromaPipeline, (t5,), of_chroma),
    "flux2": Case(diffusers.Flux2Pipeline, (mistral,), of_one_tensor),
    "flux2 klein": Case(diffusers.Flux2KleinPipeline, (qwen3(28),), of_one_tensor),
    "qwen image": Case(diffusers.QwenImagePipeline, (qwen_vl,), of_a_mask),
    "hunyuan video": Case(
        diffusers.HunyuanVideo15Pipeline,
        (qwen_vl_text, byt5),
        of_hunyuan_video,
        (),
        {"guider": None, "vae": HUNYUAN_VIDEO_VAE},
    ),
    "wan": Case(diffusers.WanPipeline, (umt5,), of_one_tensor),
    "sdxl": Case(diffusers.StableDiffusionXLPipeline, (clip, projected_clip), of_sdxl, ()),
    "pixart": Case(diffusers.PixArtAlphaPipeline, (t5,), of_guidance),
    "pixart sigma": Case(diffusers.PixArtSigmaPipeline, (t5,), of_guidance),
    "sd3": Case(diffusers.StableDiffusion3Pipeline, (projected_clip, projected_clip, wide_t5), of_sd3),
    "z image": Case(diffusers.ZImagePipeline, (qwen3(4),), of_a_list),
    "lumina 2": Case(diffusers.Lumina2Pipeline, (gemma,), of_guidance),
    "prx": Case(diffusers.PRXPipeline, (t5gemma,), of_prx, ()),
    "sana": Case(diffusers.SanaPipeline, (gemma,), of_guidance, ("max_sequence_length", "complex_human_instruction")),
}


def save_pipeline(root: Path, case: Case) -> Any:
    parts: dict[str, Any] = {}
    for i, make in enumerate(case.encoders):
        suffix = f"_{i + 1}" if i else ""
        parts[f"text_encoder{suffix}"], parts[f"tokenizer{suffix}"] = make(root / f"source{i}")
    names = signature(case.kind.__init__).parameters
    absent = {name: None for name in ("scheduler", "vae", "transformer", "unet") if name in names}
    pipeline = case.kind(**parts, **{**absent, **case.others})
    pipeline.save_pretrained(root / "pipeline")
    return pipeline


@pytest.mark.parametrize("name", CASES)
def test_the_folder_of_a_pipeline_encodes_prompts_as_the_pipeline(name: str, tmp_path: Path) -> None:
    """All entries are compared, with the pipeline's default arguments; long texts are truncated."""
    case = CASES[name]
    pipeline = save_pipeline(tmp_path, case)
    if name in ("flux", "sd3"):
        pipeline.tokenizer_max_length = pipeline.tokenizer.model_max_length
    defaults = signature(case.kind.__call__).parameters
    with torch.no_grad():
        expected = case.expected(pipeline, {option: defaults[option].default for option in case.options})
    encoders = TextEncoders(str(tmp_path / "pipeline"))
    found = encoders.encode([*TEXTS, ""])
    assert found.keys() == expected.keys()
    for entry, values in expected.items():
        for a, b in zip(found[entry], values, strict=True):
            torch.testing.assert_close(a, b, **ROUNDING)
    line = check_text_encoder(str(tmp_path / "pipeline"))
    assert line.widths == {entry: values[0].shape[-1] for entry, values in found.items()}
    assert check_text_encoder(line.recorded) == line


@pytest.mark.parametrize("name", ["lumina 2", "pixart", "sana"])
def test_negative_prompts_are_encoded_as_by_the_pipeline(name: str, tmp_path: Path) -> None:
    """Lumina 2 and SANA add their instruction only to the prompts."""
    pipeline, defaults = save_pipeline(tmp_path, CASES[name]), signature(CASES[name].kind.__call__).parameters
    options = {option: defaults[option].default for option in CASES[name].options}
    with torch.no_grad():
        expected = negatives_of(pipeline.encode_prompt(TEXTS, negative_prompt=TEXTS, device="cpu", **options))
    found = TextEncoders(str(tmp_path / "pipeline")).encode(TEXTS, negative=True)["text"]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **ROUNDING)


def test_a_pipeline_of_an_unknown_class_or_without_an_encoder_is_refused(tmp_path: Path) -> None:
    save_clip(tmp_path / "text_encoder")
    (tmp_path / "model_index.json").write_text('{"_class_name": "KolorsPipeline"}')
    with pytest.raises(
        ConfigError, match=r"name its part, such as .*text_encoder \(the encoders of class 'KolorsPipeline' are"
    ):
        check_text_encoder(str(tmp_path))
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ConfigError, match=r"FluxPipeline in .* has no text_encoder_2; copy or download it again"):
        check_text_encoder(str(tmp_path))
