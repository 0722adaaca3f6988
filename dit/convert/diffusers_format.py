"""Base class for the model classes of diffusers, and selection of a class for a model."""

import importlib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Optional, TypeVar

from torch import Tensor

from dit.convert.rules import (
    ONLY_SUPPORTED,
    TURNED_HEAD,
    Axes,
    ByHead,
    Form,
    RuleBook,
    Shape,
    expanded,
    layer_rules,
    pattern_and_number,
    require,
)
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.objectives.base import Objective
from dit.objectives.flow_matching import FlowMatching
from dit.ranges import MOST_POSITIONS
from dit.safe_files import read_yaml, valid_entries

VERSION = "0.38.0"
"""The release of diffusers that tests compare exports with."""
MODULES = ("autoencoder", "cross", "dit", "flux", "hunyuan_video", "prx", "sandwich", "sd3", "unet")
"""The modules `dit.convert.diffusers_NAME`, with the `DiffusersFormat` of each supported diffusers class."""
ARGUMENTS = Path(__file__).with_name("diffusers_arguments.yaml")

USUAL = {
    "context_size": ("joint_attention_dim", "caption_channels", "cap_feat_dim", "context_in_dim", "text_dim"),
    "pooled_size": ("pooled_projection_dim",),
    "rope_axes": ("axes_dims_rope", "axes_dim_rope", "axes_dims", "rope_axes_dim"),
    "layernorm_epsilon": ("eps",),
    "num_joint_layers": ("num_layers",),
}
"""Names in diffusers of settings with equal values, by ours."""

LatentSize = tuple[int, int, int]
Model = TypeVar("Model", bound=ModelConfig)


@dataclass(frozen=True)
class TrainedModel:
    """Settings of a trained model, imported or from a run.

    Attributes:
        objective: of the training; the published one, with logit-normal times of flow matching, if the files do not
            have it.
        latent_size: (T, H, W) of the training latents.
        sampling: the authors' sampling settings, by the names of `SamplingConfig`.
        text_encoder: name of the text encoder; None without text, or if unknown.
        max_text_tokens: tokens to which training texts were truncated; None for no limit.
        fps: frames per second of the training data; None if unknown.
        clean_parts: parts of training samples without noise, `reference` (`data.references`) and `first_frame`
            (`data.clean_first_frame`).
        reference_aspect: `--aspect` by which references of the training data were cropped; None if unknown.
        notes: sentences about differences in our network, and about the files.
        recorded: whether the files have the record of `launch.export` or the schedule of a pipeline, so that nothing is
            assumed.
    """

    model: ModelConfig
    objective: Objective
    latent_size: LatentSize
    sampling: Mapping[str, Any]
    class_names: Optional[list[str]] = None
    text_encoder: Optional[str] = None
    autoencoder: Optional[str] = None
    max_text_tokens: Optional[int] = None
    attributions: list[str] = field(default_factory=list)
    fps: Optional[float] = None
    clean_parts: list[str] = field(default_factory=list)
    reference_aspect: Optional[str] = None
    notes: list[str] = field(default_factory=list)
    recorded: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if math.prod(self.latent_size) > MOST_POSITIONS:
            raise ConfigError(
                f"latents of {' x '.join(map(str, self.latent_size))} (frames x height x width) have more than "
                f"{MOST_POSITIONS:,} positions; correct sample_size in config.json"
            )


NULLS = ("text.null", "conditioner.pooled.null")
"""Our learned parameters for a dropped text."""


def learned_nulls(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Return the learned parameters for a dropped text, and the reason why diffusers has no counterpart."""
    why = "its pipelines embed the empty text instead; train with model.null_text=empty for the same samples"
    return {name: why for name in NULLS if name in shapes}


def square_side(class_name: str, latent_size: LatentSize, multiple: int) -> tuple[int, list[str]]:
    """Return the `sample_size` of a square with the area of the latent, and a note if the latent is not a square."""
    frames, height, width = latent_size
    if frames != 1:
        raise ConfigError(f"latents of {frames} x {height} x {width}: {class_name} draws pictures, not clips")
    if height == width:
        return height, []
    side = max(1, math.isqrt(height * width) // multiple) * multiple
    return side, [f"sample_size={side} is a square with about the area of {height} x {width}, the largest sample"]


@cache
def arguments_of(class_name: str) -> Mapping[str, Any]:
    """Return the arguments of a diffusers constructor with their defaults."""
    classes: Mapping[str, Mapping[str, Any]] = read_yaml(ARGUMENTS, ConfigError, "install this project again")
    return classes[class_name]


TRAINING_SETTINGS = {"context_dropout", "class_dropout", "rope_scaling", "lora", "base_width", "null_text"}
"""Our settings that do not change the network of an export. `rope_scaling` has an effect only with `rope_factors`."""


def check_settings(side: str, model: Any, supported: Any, free: Collection[str]) -> None:
    """Check that a model has the settings of a model that the other code base, `side`, supports.

    Args:
        free: settings that may have any value.
    """
    ours, theirs = (
        {
            **vars(network),
            "ffn_hidden_size": getattr(network, "ffn_size", None),
            "out_channels": getattr(network, "out_channels", None) or network.in_channels,
        }
        for network in (model, supported)
    )
    if ours.get("num_query_groups") == ours.get("num_attention_heads"):  # as many as without groups
        ours["num_query_groups"] = None
    if set(ours.get("rope_factors") or [1.0]) == {1.0}:
        ours["rope_factors"] = None
    names = {name: value for name, value in theirs.items() if name not in {*TRAINING_SETTINGS, *free}}
    require(f"{side} does not support this model", ours, names, ONLY_SUPPORTED)


class DiffusersFormat(Generic[Model]):
    """One model class of diffusers, described by data as far as possible.

    Attributes:
        aliases: older names of this class, distinguished from others by `norm_type`.
        other: arguments without effect on the network, or with several values for one network. All others, except
            `mlp_ratio`, must have the values that `write_sizes` returns for the model.
        same: diffusers' names of settings with equal values, by ours, in addition to equal names and `USUAL`.
        free: our settings that a model may have with any value, though `config.json` does not store them exactly.
        names: diffusers' names of layers by ours, as in `layer_rules`.
        stored_tables: whether files contain the results of `tables`.
        latent_size: (T, H, W) of training, if it is not in the settings.
        time_shift: time shift of the published models' flow matching.
        sampling: steps and guidance of their pipeline.
        comfyui: names of layers in diffusers, by their names in ComfyUI (of the original code), as in `expanded`.
        part: name of the model in diffusers' pipelines, and prefix of its adapters.
    """

    class_name: str
    aliases: tuple[str, ...] = ()
    config_class: type[Model]
    other: Collection[str] = ()
    same: Mapping[str, str] = MappingProxyType({})
    free: Collection[str] = ()
    names: Mapping[str, str] = MappingProxyType({})
    stored_tables: bool = False
    latent_size: LatentSize
    time_shift: float
    sampling: Mapping[str, Any]
    comfyui: Mapping[str, str] = MappingProxyType({})
    part: str = "transformer"

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Every argument of the diffusers constructor with its default."""
        return arguments_of(self.class_name)

    @property
    def equal(self) -> dict[str, str]:
        """Diffusers' names of all settings with equal values, by ours."""
        own = [setting.name for setting in fields(self.config_class)]
        names = {name: [theirs for theirs in (name, *USUAL.get(name, ())) if theirs in self.defaults] for name in own}
        return {name: theirs[0] for name, theirs in names.items() if theirs} | dict(self.same)

    def network(self, published: Mapping[str, Any]) -> Model:
        """Return our network for diffusers' settings, completed by `defaults`."""
        build: Any = self.config_class
        return build(**self.read_sizes(published))

    def read_sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """Return our settings for diffusers' settings."""
        sizes: dict[str, Any] = {"null_text": "empty"} if hasattr(self.config_class, "null_text") else {}
        sizes |= {ours: published[theirs] for ours, theirs in self.equal.items()}
        sizes |= {name: float(sizes[name]) for name in ("rope_theta", "time_scale") if name in sizes}
        if "attention_head_dim" in self.defaults:
            sizes["hidden_size"] = published["num_attention_heads"] * published["attention_head_dim"]
        if "mlp_ratio" in self.defaults:
            sizes["ffn_hidden_size"] = int(published["mlp_ratio"] * sizes["hidden_size"])
        if "out_channels" in sizes and sizes["out_channels"] == published["in_channels"]:
            sizes["out_channels"] = None
        return sizes

    def trained(self, model: Model, published: Mapping[str, Any]) -> TrainedModel:
        """Return a model with objective, latent size and sampling of the published ones."""
        inputs, outputs = published["in_channels"], published.get("out_channels")
        if model.in_channels > (getattr(model, "out_channels", None) or model.in_channels):
            raise ConfigError(
                f"in_channels={inputs} is above out_channels={outputs}: this network also reads inputs that "
                f"{type(model).__name__} does not have, such as a mask; use the text-to-image or text-to-video network"
            )
        if "sample_size" in self.defaults:
            latent_size, notes = (1, published["sample_size"], published["sample_size"]), []
        else:
            latent_size = self.latent_size
            notes = [f"config.json has no latent size; {' x '.join(map(str, latent_size))} is assumed"]
        if (guidance := getattr(model, "guidance", None)) is not None:
            notes.append(f"the network gets a guidance scale of {guidance:g} (model.guidance)")
        sampling = {"solver": "euler", **self.sampling}
        return TrainedModel(model, self.objective(model), latent_size, sampling, notes=notes)

    def objective(self, model: Model) -> Objective:
        """Return the objective of the published models."""
        return FlowMatching(time_shift=self.time_shift, time_distribution="logit_normal")

    def write_sizes(self, model: Any, latent_size: LatentSize) -> dict[str, Any]:
        """Invert `read_sizes`: return the settings that differ from `defaults`."""
        settings: dict[str, Any] = {theirs: getattr(model, ours) for ours, theirs in self.equal.items()}
        if "attention_head_dim" in self.defaults:
            settings["attention_head_dim"] = model.hidden_size // model.num_attention_heads
        if "mlp_ratio" in self.defaults:
            ratio = model.ffn_size / model.hidden_size  # diffusers rounds its product with the width down
            exact = int(ratio * model.hidden_size) == model.ffn_size
            settings["mlp_ratio"] = ratio if exact else (model.ffn_size + 0.5) / model.hidden_size
        if "out_channels" in self.defaults:
            settings["out_channels"] = getattr(model, "out_channels", None) or model.in_channels
        if "sample_size" in self.defaults:
            settings["sample_size"] = square_side(self.class_name, latent_size, model.patch_spatial)[0]
        return settings

    def rules(self, model: Model, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        unmatched = learned_nulls(shapes)
        parameters = [name for name in shapes if name not in unmatched]
        num_joint = getattr(model, "num_joint_layers", None)
        rules = layer_rules(parameters, self.names, self.forms(model), num_joint=num_joint)
        return RuleBook(shapes, rules, self.tables(model, latent_size), self.stored_tables, unmatched)

    def forms(self, model: Model) -> Mapping[str, Form]:
        """Return the forms of layers that diffusers stores in another way: here projections and norms of attention."""
        sizes: Any = model
        groups = getattr(model, "num_query_groups", None) or sizes.num_attention_heads
        size, queries = sizes.head_size, sizes.num_attention_heads // groups
        turned = (0, 1) if sizes.position_embedding == "rope_3d" else ()
        forms: dict[str, Form] = {}
        for layer, theirs in expanded(self.names).items():
            if layer.endswith(".linear_qkv"):
                shares = (queries * size, size, size)
                forms[layer] = ByHead(groups, shares, turned, fused=len(theirs) == 1, queries=queries)
            elif layer.endswith(".linear_kv"):
                forms[layer] = ByHead(groups, (size, size), fused=len(theirs) == 1)
            elif layer.endswith((".q_layernorm", ".k_layernorm")) and turned:
                forms[layer] = TURNED_HEAD
        return forms

    def tables(self, model: Model, latent_size: LatentSize) -> Mapping[str, Tensor]:
        """Return diffusers' tensors that our model computes."""
        return {}

    def for_pipeline(self, trained: TrainedModel, weights: dict[str, Tensor]) -> tuple[TrainedModel, dict[str, Tensor]]:
        """Return a model and its weights, with our names, in the sizes that diffusers' pipeline expects."""
        return trained, weights

    def comfyui_name(self, layer: str) -> Optional[str]:
        """Return ComfyUI's name of a linear layer of diffusers; None if it is unknown."""
        pattern, number = pattern_and_number(layer)
        for name, layers in expanded(self.comfyui).items():
            if pattern in layers:
                return f"diffusion_model.{name.replace('#', number)}"
        return None

    def other_names(self, layer: str, model: Model) -> list[str]:
        """Return further names of a diffusers layer in adapter files."""
        return []

    def describes(self, model: ModelConfig) -> bool:
        """Return whether the class is that of a model."""
        return type(model) is self.config_class

    def reads(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a `config.json` is of this class."""
        name = settings.get("_class_name")
        return name == self.class_name or (
            name in self.aliases and settings.get("norm_type") == self.defaults.get("norm_type")
        )

    def read_settings(self, settings: Mapping[str, Any]) -> TrainedModel:
        """Read a `config.json`; raise `ConfigError` for settings that our backbone does not support.

        These are settings that `write_settings` does not return for the model that was read.
        """
        arguments = {name: value for name, value in settings.items() if not name.startswith("_")}
        # Old files have arguments that no longer exist; they have no effect if unset.
        unknown = [f"{n}={v!r}" for n, v in arguments.items() if n not in self.defaults and v not in (None, False)]
        complete = {n: arguments.get(n, default) for n, default in self.defaults.items()}
        complete = {n: list(v) if isinstance(v, list | tuple) else v for n, v in complete.items()}
        with valid_entries(f"config.json of {self.class_name}", ConfigError, "download it again"):
            trained = self.trained(self.network(complete), complete)
            written, _ = self.write_settings(trained.model, trained.latent_size)
        if "out_channels" in complete:  # None stands for the number of input channels
            for values in (complete, written):
                values["out_channels"] = values["out_channels"] or values["in_channels"]
        compared = [n for n in complete if n not in {*self.other, "mlp_ratio"}]
        wrong = [f"{n}={complete[n]!r} (only {written[n]!r})" for n in compared if complete[n] != written[n]]
        if unknown or wrong:
            faults = "; ".join(
                f"{kind}: {', '.join(names)}" for kind, names in (("unknown", unknown), ("unsupported", wrong)) if names
            )
            raise ConfigError(
                f"{self.config_class.__name__} does not support these settings of {self.class_name}: {faults}; weights "
                "with them cannot be imported"
            )
        return trained

    def write_settings(self, model: ModelConfig, latent_size: LatentSize) -> tuple[dict[str, Any], list[str]]:
        """Return a complete `config.json` and the notes.

        A model is supported if reading these settings gives the same model.
        """
        complete = {**self.defaults, **self.write_sizes(model, latent_size)}
        check_settings(self.class_name, model, self.network(complete), self.free)
        header = {"_class_name": self.class_name, "_diffusers_version": VERSION}
        return {**header, **complete}, self.notes(model, latent_size)

    def notes(self, model: Any, latent_size: LatentSize) -> list[str]:
        """Return sentences about differences in effect."""
        return []


def patches(pattern: str, model: ModelConfig, **sizes: int) -> Axes:
    """Return the form of a layer of patches, by an einops pattern with the axes `pt`, `ph` and `pw` of a patch."""
    sizes |= {"pt": model.patch_temporal, "ph": model.patch_spatial, "pw": model.patch_spatial}
    axes = set(re.findall(r"\w+", pattern))
    return Axes(pattern, {axis: size for axis, size in sizes.items() if axis in axes})


def formats() -> list[DiffusersFormat[ModelConfig]]:
    """Return the format of every supported class, by its name."""
    modules = [importlib.import_module(f"dit.convert.diffusers_{name}") for name in MODULES]
    kinds = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    named = [kind for kind in kinds if issubclass(kind, DiffusersFormat) and "class_name" in vars(kind)]
    return sorted((kind() for kind in named), key=lambda form: form.class_name)


def format_of_settings(settings: Mapping[str, Any]) -> DiffusersFormat[ModelConfig]:
    """Return the format of a `config.json`."""
    if form := next((form for form in formats() if form.reads(settings)), None):
        return form
    raise ConfigError(
        f"_class_name={settings.get('_class_name')!r} is not supported; supported classes are "
        + ", ".join(form.class_name for form in formats())
    )


def format_of_model(model: ModelConfig) -> DiffusersFormat[ModelConfig]:
    """Return the format for a model."""
    if form := next((form for form in formats() if form.describes(model)), None):
        return form
    supported = ", ".join(dict.fromkeys(candidate.config_class.__name__ for candidate in formats()))
    raise ConfigError(
        f"diffusers {VERSION} has no model like {type(model).__name__}; backbones with one are {supported}"
    )


def export_line(model: ModelConfig) -> str:
    """Return the name of diffusers' class for a model of square pictures, or why there is none."""
    try:
        form = format_of_model(model)
        side = model.patch_spatial << 12  # a multiple of every halving
        form.write_settings(model.without_adapters(), (1, side, side))
    except ConfigError as error:
        return f"no export to diffusers: {re.split(r' [(]|; ', str(error))[0]}"
    return f"diffusers' {form.class_name}"
