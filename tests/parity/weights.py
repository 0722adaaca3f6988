"""Convert weights and gradients between the DiT of `dit` and the plain reference."""

import math
import re

import torch
from torch import Tensor, nn

from dit.models.dit.config import DiTConfig
from tests.parity.reference_dit import ReferenceDiT

_DIRECT = {
    "conditioner.time.linear_1": "time_1",
    "conditioner.time.linear_2": "time_2",
    "conditioner.interval.linear_1": "interval_1",
    "conditioner.interval.linear_2": "interval_2",
    "conditioner.text.linear_1": "text_1",
    "conditioner.text.linear_2": "text_2",
    "conditioner.text.null": "null_text",
    "embed": "patch",
    "bottleneck": "bottleneck",
    "head.modulation": "final_modulation",
    "head.linear": "final",
    "modulation.linear": "modulation",
    "attention.linear_proj": "out",
    "value_weights": "first_shares",
    "attention.q_layernorm.weight": "query_norm",
    "attention.k_layernorm.weight": "key_norm",
    "mlp.linear_fc1": "up",
    "mlp.linear_fc2": "down",
    "attention_norm.weight": "norm_1",
    "mlp_norm.weight": "norm_2",
    "head.norm.weight": "final_norm",
    "head.condition": "wide_condition",
    "head.embed.linear": "wide_patch",
    "head.final.modulation": "final_modulation",
    "head.final.linear": "final",
    "head.final.norm.weight": "final_norm",
    "class_tokens.vectors": "class_vectors",
    "teacher_token.linear": "token",
    "teacher_token.norm": "token_norm",
}


def reference_of(config: DiTConfig) -> ReferenceDiT:
    """Build the reference of a DiT config, in float64."""
    return ReferenceDiT(
        size=config.hidden_size,
        depth=config.num_layers,
        heads=config.num_attention_heads,
        inner=config.ffn_size,
        patch_in=config.token_channels,
        patch_out=config.output_features,
        classes=config.num_classes,
        text_size=config.context_size,
        bias=config.add_bias,
        qk_norm=config.qk_layernorm,
        eps=config.layernorm_epsilon,
        time_scale=config.time_scale,
        positions=config.position_embedding,
        rope=config,
        bottleneck=config.bottleneck_size,
        swiglu=config.activation == "swiglu",
        rms=config.rms_norm,
        class_tokens=config.class_tokens,
        token=config.teacher_token_size,
        intervals=config.interval_conditioning,
        value_residual=config.value_residual,
        wide_head=None if config.wide_head is None else (*config.wide_head, inner_of_wide_head(config)),
    ).double()


def inner_of_wide_head(config: DiTConfig) -> int:
    """Return the inner width of the MLPs of the wide head: the ratio of the body, in a multiple of 64."""
    assert config.wide_head is not None
    return 64 * math.ceil(config.ffn_size / config.hidden_size * config.wide_head[1] / 64)


def reference_names(name: str) -> list[str]:
    """Return the reference parameters that form one of ours: three for the fused qkv, two for the label table."""
    prefix = ""
    if match := re.match(r"(head\.)?layers\.(\d+)\.(.*)", name):
        prefix, name = f"{'wide_' if match[1] else ''}blocks.{match[2]}.", match[3]
    if match := re.fullmatch(r"attention\.linear_qkv\.(weight|bias)", name):
        return [f"{prefix}{part}.{match[1]}" for part in ("query", "key", "value")]
    if name == "conditioner.label.weight":
        return ["labels", "null_label"]
    if name in _DIRECT:
        return [prefix + _DIRECT[name]]
    module, _, kind = name.rpartition(".")
    return [f"{prefix}{_DIRECT[module]}.{kind}"]


def split_parameter(name: str, x: Tensor, heads: int) -> list[Tensor]:
    """Split one of our tensors into reference tensors; rows of a fused qkv: q, k, v of head 0, of head 1, ..."""
    if "linear_qkv" in name:
        return [part.flatten(0, 1) for part in x.unflatten(0, (heads, 3, -1)).unbind(1)]
    if name == "conditioner.label.weight":
        return [x[:-1], x[-1]]
    return [x]


def join_parameters(name: str, parts: list[Tensor], heads: int) -> Tensor:
    """Undo `split_parameter`."""
    if "linear_qkv" in name:
        return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 2)
    if name == "conditioner.label.weight":
        return torch.cat([parts[0], parts[1][None]])
    return parts[0]


@torch.no_grad()
def copy_weights(model: nn.Module, reference: ReferenceDiT, heads: int) -> None:
    """Copy our weights into the reference; every parameter of both sides must occur exactly once."""
    reference_parameters = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        for target, part in zip(reference_names(name), split_parameter(name, parameter, heads), strict=True):
            tensor = reference_parameters.pop(target)
            assert tensor.shape == part.shape, (name, target)
            tensor.copy_(part)
    assert not reference_parameters, (
        f"parameters of the reference that this model lacks: {sorted(reference_parameters)}"
    )


def reference_gradients(model: nn.Module, reference: ReferenceDiT, heads: int) -> dict[str, Tensor]:
    """Return the reference's gradients under our names and in our shapes; zeros where it has none."""
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in reference.named_parameters()}
    return {
        name: join_parameters(name, [grads[target] for target in reference_names(name)], heads)
        for name, _ in model.named_parameters()
    }
