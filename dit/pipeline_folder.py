"""Folders of diffusers' pipelines, which have one folder for each network, and the text encoders of each pipeline."""

from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from dit.errors import ConfigError
from dit.safe_files import read_json

PIPELINE_INDEX = "model_index.json"
_FLUX = {"text_encoder_2": "text={}:padded", "text_encoder": "pooled={}"}
_WAN = {"text_encoder": "{}:prompt=wan:zero_padded"}
_SANA = {"text_encoder": "{}:prompt=sana:max_tokens=300"}
_HUNYUAN_VIDEO = {
    "text_encoder": "{}:prompt=hunyuan_video:layer=-3:max_tokens=1000",
    "text_encoder_2": "text_2={}:prompt=shown_texts:max_tokens=256",
}
_LUMINA = {"text_encoder": "{}:prompt=lumina2:layer=-2:max_tokens=256"}
TEXT_ENCODERS: Mapping[str, Mapping[str, str]] = {
    "DiTPipeline": {},
    "StableDiffusionPipeline": {"text_encoder": "{}:padded"},
    "StableDiffusionXLPipeline": {
        "text_encoder": "text={}:layer=penultimate:padded",
        "text_encoder_2": "text+pooled={}:layer=penultimate:padded:joined",
    },
    "StableDiffusion3Pipeline": {
        "text_encoder": "text+pooled={}:layer=penultimate:padded",
        "text_encoder_2": "text+pooled={}:layer=penultimate:padded:joined",
        "text_encoder_3": "text={}:max_tokens=256:padded:appended",
    },
    "PixArtAlphaPipeline": {"text_encoder": "{}:prompt=lower_case:max_tokens=120"},
    "PixArtSigmaPipeline": {"text_encoder": "{}:prompt=lower_case:max_tokens=300"},
    **dict.fromkeys(("FluxPipeline", "FluxKontextPipeline", "FluxFillPipeline", "FluxControlPipeline"), _FLUX),
    "ChromaPipeline": {"text_encoder": "{}:padded_once"},
    "Flux2Pipeline": {"text_encoder": "{}:prompt=flux2:layer=10+20+30:padded"},
    "Flux2KleinPipeline": {"text_encoder": "{}:prompt=chat:layer=9+18+27:padded"},
    "QwenImagePipeline": {"text_encoder": "{}:prompt=qwen_image"},
    "QwenImageEditPipeline": {"text_encoder": "{}:prompt=qwen_image_edit"},
    "QwenImageEditPlusPipeline": {"text_encoder": "{}:prompt=qwen_image_edit_plus"},
    "ZImagePipeline": {"text_encoder": "{}:prompt=chat_thinking:layer=-2"},
    "PRXPipeline": {"text_encoder": "{}:prompt=lower_case:max_tokens=256"},
    **dict.fromkeys(("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"), _HUNYUAN_VIDEO),
    **dict.fromkeys(("WanPipeline", "WanImageToVideoPipeline", "WanVACEPipeline"), _WAN),
    **dict.fromkeys(("SanaPipeline", "SanaSprintPipeline"), _SANA),
    **dict.fromkeys(("Lumina2Pipeline", "Lumina2Text2ImgPipeline"), _LUMINA),
}
"""Encoders of each class of pipelines by folder, in the syntax of `dit.encoders.text_config`; `{}` is the folder.

Source: diffusers 0.38, `encode_prompt` of each class, and the `max_sequence_length` of its `__call__`.
"""


def text_encoders_of(folder: Path) -> list[str]:
    """Return the text encoders of a pipeline, in the syntax of `dit.encoders.text_config`."""
    index = read_json(folder / PIPELINE_INDEX, ConfigError, "copy or download it again")
    name = str(index.get("_class_name")) if isinstance(index, dict) else ""
    parts = TEXT_ENCODERS.get(name)
    if not parts:
        raise ConfigError(f"{name_a_part(folder, 'text_encoder')} (the encoders of class {name!r} are unknown)")
    if absent := [part for part in parts if not (folder / part / "config.json").is_file()]:
        raise ConfigError(f"{name} in {folder} has no {', '.join(absent)}; copy or download it again")
    return [form.format(folder / part) for part, form in parts.items()]


def entries_and_name(text: str) -> tuple[str, str]:
    """Split `ENTRIES=NAME` or `NAME` of a text encoder; the path of a folder may have an equals sign, too."""
    entries, equals, name = text.partition("=")
    return (entries, name) if equals and "/" not in entries else ("", text)


def with_folders_of(line: str, recorded: Optional[str]) -> str:
    """Return recorded text encoders in the folders of a pipeline, which may have moved; their options are kept.

    Args:
        line: encoders of the pipeline; returned if the recorded ones make other entries.
    """
    parts = ([part.partition(":") for part in text.split(",")] for text in (line, recorded or ""))
    here, there = ([(*entries_and_name(head), colon + options) for head, colon, options in some] for some in parts)
    if [entries or "text" for entries, _, _ in here] != [entries or "text" for entries, _, _ in there]:
        return line
    return ",".join(f"{entries or 'text'}={name}{options}" for (entries, name, _), (_, _, options) in zip(here, there))


def name_a_part(path: Path | str, *kinds: str) -> str:
    """Return an error message if a path is a complete pipeline where one of its networks is needed, else an empty text.

    Args:
        kinds: beginnings of the names of networks that fit, such as `vae`.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return ""
    parts = sorted(entry.parent for entry in folder.glob("*/config.json"))
    fitting = [str(part) for part in parts if part.name.startswith(kinds)]
    if fitting:
        return f"{folder} is a complete pipeline; name its part, such as {' or '.join(fitting)}"
    if not (folder / PIPELINE_INDEX).is_file():
        return ""
    names = ", ".join(part.name for part in parts) or "none"
    return f"{folder} is a complete pipeline without a part {' or '.join(kinds)}; its parts are: {names}"
