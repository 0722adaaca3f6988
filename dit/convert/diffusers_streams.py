"""Conversion of models with text and image as two streams (`dit.models.streams`), common to their diffusers classes.

Differences of all of diffusers' models:

* q, k and v are separate matrices;
* features that rotate together are adjacent, ours have a distance of half a head, so the rows of q and k and the
  weights of their norms are permuted;
* the last modulation is ordered scale, then shift;
* the pipeline cuts patches of 2 x 2, channels slowest, so `in_channels` is that of a token.

Our learned null token and null vector for a dropped text have no counterpart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Optional, TypeVar

from dit.convert.diffusers_format import DiffusersFormat, LatentSize, TrainedModel, learned_nulls
from dit.convert.rules import (
    TRAIN_THAT_WAY,
    TURNED_HEAD,
    Axes,
    ByHead,
    Chunks,
    Form,
    Rule,
    RuleBook,
    Same,
    Shape,
    require,
    with_bias,
)
from dit.errors import ConfigError
from dit.models.streams.config import StreamsConfig
from dit.objectives.flow_matching import FlowMatching

PATCH = 2  # fixed in the pipelines
PATCH_SIZES = {"ph": PATCH, "pw": PATCH}
LATENT_SIZE = (1, 128, 128)  # 1024 px; not in the settings
FREE = {
    *("in_channels", "out_channels", "context_size", "hidden_size", "num_attention_heads", "num_joint_layers"),
    *("ffn_hidden_size", "rope_axes", "context_dropout", "rope_scaling", "lora", "null_text"),
}
"""Our settings that all of diffusers' classes have, or that do not change the network."""
GATED = Axes("(two f) ... -> (f two) ...", {"two": 2})
"""The first matrix of a SwiGLU, with all gates first."""

Model = TypeVar("Model", bound=StreamsConfig)


def outer_names(embedder: str, **parts: str) -> dict[str, str]:
    """Return diffusers' names of the layers around the blocks, by ours."""
    return {
        "embed.linear": "x_embedder",
        "embed_text": "context_embedder",
        "head.modulation": "norm_out.linear",
        "head.linear": "proj_out",
        **{
            f"conditioner.{ours}.{linear}": f"{embedder}.{theirs}_embedder.{linear}"
            for ours, theirs in parts.items()
            for linear in ("linear_1", "linear_2")
        },
    }


@dataclass(frozen=True)
class StreamNames:
    """Names of diffusers' layers of one stream in a joint block, after `transformer_blocks.0`.

    Attributes:
        attention: its layers in attention, in the order of `attention_rules`.
        modulation: None if all blocks share it.
    """

    attention: tuple[str, ...]
    fc1: str
    fc2: str
    modulation: Optional[str] = None


SELF_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k")
ADDED = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k")
IMAGE, TEXT = (partial(StreamNames, tuple(f"attn.{name}" for name in names)) for names in (SELF_ATTENTION, ADDED))
"""Names in attention, which all classes share."""


COMFYUI_ATTENTION = (
    (r"transformer_blocks\.(\d+)\.attn\.to_[qkv]", r"double_blocks.\1.img_attn.qkv"),
    (r"transformer_blocks\.(\d+)\.attn\.to_out\.0", r"double_blocks.\1.img_attn.proj"),
    (r"transformer_blocks\.(\d+)\.attn\.add_[qkv]_proj", r"double_blocks.\1.txt_attn.qkv"),
    (r"transformer_blocks\.(\d+)\.attn\.to_add_out", r"double_blocks.\1.txt_attn.proj"),
)
"""ComfyUI's names of the layers of joint attention in FLUX, by diffusers' names."""


class DiffusersStreams(DiffusersFormat[Model]):
    """A diffusers class for a family of `StreamsConfig`. All settings except `FREE` and `free` have the defaults.

    Attributes:
        names: names of diffusers' layers by ours, outside the blocks.
        streams: names of diffusers' layers in joint blocks, by stream.
        free: further settings that diffusers' class has.
        blocks: names of the lists of blocks with two streams, and with one.
    """

    names: Mapping[str, str]
    streams: Mapping[str, StreamNames]
    free: frozenset[str] = frozenset()
    blocks: tuple[str, str] = ("transformer_blocks", "single_transformer_blocks")

    def sizes(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes that have the same names in all classes."""
        channels = published["in_channels"]
        if channels % PATCH**2:
            raise ConfigError(
                f"in_channels={channels}: tokens are patches of {PATCH} x {PATCH}, so it must be a multiple of "
                f"{PATCH**2}"
            )
        return {
            "in_channels": channels // PATCH**2,
            "context_size": published["joint_attention_dim"],
            "hidden_size": published["num_attention_heads"] * published["attention_head_dim"],
            "num_attention_heads": published["num_attention_heads"],
            "num_joint_layers": published["num_layers"],
            "rope_axes": list(published["axes_dims_rope"]),
        }

    def check(self, model: Model) -> None:
        """Check that the class has every property of a model."""
        kind: Any = self.config_class
        default = kind()
        names = {field.name for field in fields(model)} - FREE - self.free
        values = {name: getattr(model, name) for name in names}
        supported = {name: getattr(default, name) for name in names}
        values["ffn_hidden_size"] = model.ffn_size
        supported["ffn_hidden_size"] = self.inner_size(model.hidden_size) or model.ffn_size
        require(f"{self.class_name} does not support this model", values, supported, TRAIN_THAT_WAY)

    def inner_size(self, hidden_size: int) -> Optional[int]:
        """Return the inner width of the MLPs that the class has for a width of the tokens; None for any."""
        return None if "mlp_ratio" in self.defaults else 4 * hidden_size

    def trained(self, model: Model, *, time_shift: float, num_steps: int, guidance_scale: float = 1.0) -> TrainedModel:
        """Return the model with the objective and the sampling of its pipeline."""
        notes = [f"config.json has no latent size; {LATENT_SIZE[1]} x {LATENT_SIZE[2]} is assumed"]
        if model.guidance is not None:
            notes.append(f"the network gets a guidance scale of {model.guidance:g} (model.guidance)")
        sampling = {"solver": "euler", "num_steps": num_steps, "guidance_scale": guidance_scale}
        return TrainedModel(model, FlowMatching(time_shift=time_shift), LATENT_SIZE, sampling, notes=notes)

    def write_sizes(self, model: Model) -> dict[str, Any]:
        """Invert `sizes`, after `check`."""
        self.check(model)
        return {
            "in_channels": model.token_channels,
            "num_layers": model.num_joint_layers,
            "attention_head_dim": model.head_size,
            "num_attention_heads": model.num_attention_heads,
            "joint_attention_dim": model.context_size,
            "axes_dims_rope": list(model.rope_axes),
        }

    def rules(self, model: Model, shapes: Mapping[str, Shape], latent_size: LatentSize) -> RuleBook:
        rules = [rule for ours, theirs in self.names.items() for rule in with_bias(ours, theirs)]
        two_streams, one_stream = self.blocks
        for i in range(model.num_joint_layers):
            rules += self.joint(model, f"layers.{i}", f"{two_streams}.{i}")
        for i in range(model.num_single_layers):
            rules += self.single(model, f"layers.{model.num_joint_layers + i}", f"{one_stream}.{i}")
        rules += self.shared(model)
        forms: dict[str, Form] = {"head.modulation": Chunks((1, 0)), **self.forms(model)}
        rules = [
            replace(rule, form=forms.get(rule.name) or forms.get(rule.name.rpartition(".")[0]) or rule.form)
            for rule in rules
            # Rules of parts that the model does not have are left out.
            if rule.name in shapes
        ]
        return RuleBook(shapes, rules, unmatched=learned_nulls(shapes))

    def forms(self, model: Model) -> Mapping[str, Form]:
        """Return the forms of further parameters or layers, by our names."""
        return {
            "embed.linear.weight": Axes("d (c ph pw) -> d (ph pw c)", PATCH_SIZES),
            "head.linear": Axes("(c ph pw) ... -> (ph pw c) ...", PATCH_SIZES),
        }

    def shared(self, model: Model) -> list[Rule]:
        """Return the rules of a modulation that all blocks share."""
        return []

    def single(self, model: Model, layer: str, block: str) -> list[Rule]:
        """Return the rules of a single block."""
        raise NotImplementedError

    def joint(self, model: Model, layer: str, block: str) -> list[Rule]:
        """Return the rules of a joint block."""
        rules = list[Rule]()
        gated = GATED if model.activation == "swiglu" else None
        for stream, names in self.streams.items():
            module = f"{layer}.{stream}"
            if names.modulation is not None:
                rules += with_bias(f"{module}.modulation.linear", f"{block}.{names.modulation}")
            rules += attention_rules(model, module, *(f"{block}.{name}" for name in names.attention))
            rules += with_bias(f"{module}.mlp.linear_fc1", f"{block}.{names.fc1}", form=gated)
            rules += with_bias(f"{module}.mlp.linear_fc2", f"{block}.{names.fc2}")
        return rules


def attention_rules(
    model: StreamsConfig, module: str, q: str, k: str, v: str, out: str, q_norm: str, k_norm: str
) -> list[Rule]:
    """Return the rules of an attention, by the names of diffusers' layers."""
    turned = (0, 1) if model.position_embedding == "rope_3d" else ()
    norms, size = head_norms(module, q_norm, k_norm), model.head_size
    groups = model.num_query_groups or model.num_attention_heads
    queries = model.num_attention_heads // groups
    form = ByHead(groups, (queries * size, size, size), turned, queries=queries)
    return [
        *with_bias(f"{module}.linear_qkv", q, k, v, form=form),
        *with_bias(f"{module}.linear_proj", out),
        *(norms if turned else (replace(rule, form=Same()) for rule in norms)),
    ]


def head_norms(module: str, q_norm: str, k_norm: str) -> list[Rule]:
    """Return the rules of the norms of queries and keys that rotate."""
    pairs = ((f"{module}.q_layernorm", q_norm), (f"{module}.k_layernorm", k_norm))
    return [Rule(f"{ours}.weight", (f"{theirs}.weight",), TURNED_HEAD) for ours, theirs in pairs]
