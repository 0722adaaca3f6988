"""Tiny version of a run: the same backbone, objective and options, in sizes for which a step takes milliseconds."""

import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Optional

from dit.kernels.fp8 import BLOCKS
from dit.models.base import ModelConfig
from dit.objectives.alignment import Alignment
from dit.objectives.autoencoding import Autoencoding
from dit.objectives.base import Objective
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.mean_flow import MeanFlow
from dit.objectives.vq_autoencoding import VQAutoencoding
from dit.parallel.dims import ParallelConfig
from dit.patchify import Grid
from dit.settings import Fp8

HEAD_SIZE = 8
"""Head size; large enough for rotary positions over t, h and w."""

GRIDS = ((1, 4, 4), (2, 2, 4), (1, 2, 2), (1, 3, 3), (3, 2, 2))
"""Patches along t, h and w of each sample; samples of a pack differ in length."""
_NUMBERS = r"[\d?!*\[\]-]+"
"""Regular expression for the part of a LoRA target with layer numbers, such as `11` or `1[01]`."""


def tiny_sides(parallel: ParallelConfig, fp8: Optional[Fp8]) -> int:
    """Return a factor for heights and widths, with which each context-parallel rank has real tokens."""
    cp = parallel.context_parallel_size
    return 1 if fp8 is None or cp == 1 else math.ceil(math.sqrt(_token_multiple(parallel, fp8) / math.prod(GRIDS[0])))


def _token_multiple(parallel: ParallelConfig, fp8: Fp8) -> int:
    """Return a multiple of the tokens of a block on every rank, also with two chunks per rank."""
    return 2 * parallel.context_parallel_size * BLOCKS[fp8]


def tiny_grids(model: ModelConfig, sides: int = 1) -> tuple[Grid, ...]:
    """Return the shapes of the samples: a single shape if the backbone does not support mixed shapes in a micro-batch.

    Images are large enough to remain 2 x 2 at the lowest resolution of the backbone: with fewer positions, queries and
    keys get no gradient.
    """
    if model.supports.mixed_shapes:
        return tuple((t, h * sides, w * sides) for t, h, w in GRIDS)
    side = max(4, 2 ** (model.halvings + 1))
    return ((1, side, side),)


def tiny_model(model: ModelConfig, parallel: ParallelConfig, fp8: Optional[Fp8] = None) -> ModelConfig:
    """Shrink widths, depths and counts to the smallest that the layout can split; other options do not change.

    Fields are recognised by the names that backbones share. Conditions are dropped for 30 % or 50 % of the samples, so
    that the learned replacement of a dropped condition has a gradient.

    Args:
        fp8: scaling of quantised products, whose blocks a layout must not cut.
    """
    settings = {field.name: getattr(model, field.name) for field in fields(model)}
    exchanged = parallel.context_parallel_size if parallel.context_comm.startswith("a2a") else 1
    unit = parallel.tensor_model_parallel_size * exchanged  # heads are split by this
    if fp8 is not None:
        unit *= BLOCKS[fp8] // 4  # all widths are multiples of 4 features per head
    grouped = settings.get("num_query_groups") not in (None, settings.get("num_attention_heads"))
    # Published classes support only this ratio.
    is_fourfold = settings.get("ffn_hidden_size") == 4 * settings.get("hidden_size", 0)
    groups = multiple_of(unit, 2)
    heads = 2 * groups if grouped else multiple_of(unit, 4)
    experts = multiple_of(parallel.expert_model_parallel_size, 4)
    sizes: dict[str, Any] = {
        "hidden_size": heads * HEAD_SIZE,
        "num_attention_heads": heads,
        "num_query_groups": groups if grouped else None,
        "num_cross_attention_heads": groups,
        "ffn_hidden_size": 4 * HEAD_SIZE * heads if is_fourfold else 12 * heads,
        "moe_ffn_hidden_size": 12 * heads,
        "in_channels": 4,
        "control_channels": 4,
        "num_classes": 5,
        "context_size": 12,
        "pooled_size": 6,
        "approximator": [16, 24, 2],
        "glyph_size": 10,
        "glyph_hidden_size": 16,
        "image_context_size": 6,
        "latent_channels": 4,
        "codebook_size": 16,
        "bottleneck_size": HEAD_SIZE,
        "class_tokens": [3, 1],
        "teacher_token_size": HEAD_SIZE - 1,
        "wide_head": [2, 2 * heads * HEAD_SIZE, heads],
        **{name: [HEAD_SIZE] * len(settings.get(name) or ()) for name in ("block_out_channels", "mid_out_channels")},
        "norm_num_groups": HEAD_SIZE // 2,
        "channel_multipliers": [1, 2],  # of UNets: two levels, with attention at the lower one
        "num_res_blocks": [1, 1],
        "attention_levels": [1],
        "head_size": HEAD_SIZE,
        "condition_size": 2 * HEAD_SIZE,
        "low_resolution_factor": 2,
        "adaln_lora_rank": 4,
        "class_dropout": settings.get("class_dropout") if settings.get("num_classes") is None else 0.3,
        "context_dropout": settings.get("context_dropout") if settings.get("context_size") is None else 0.5,
        **_depth(settings, parallel),
        "num_experts": experts,
        **{name: min(settings.get(name) or experts, experts) for name in ("moe_top_k", "moe_capacity_factor")},
    }
    if settings.get("lora") is not None:
        total = model.megatron_sizes().num_layers
        kinds = [0, settings.get("num_dual_layers", 0), settings.get("num_joint_layers", total), total]
        tiny_kinds = [0, *(sizes[name] for name in ("num_dual_layers", "num_joint_layers", "num_layers"))]
        parts = _layer_parts(kinds, tiny_kinds)
        targets = [tiny for target in settings["lora"].targets for tiny in _tiny_targets(target, parts)]
        sizes["lora"] = replace(settings["lora"], targets=targets)
    if settings.get("interval_conditioning"):
        sizes["time_scale"] = 1.0  # a product with the step of MeanFlow, which is large, must be below 1
    if settings.get("routing") is not None:
        # A fused middle is on the last pipeline stage; another one is on several, if there are several.
        fused, layers = settings["routing"].rejoin == "fused", sizes["num_layers"]
        last = layers // _stages(parallel) if fused else layers - 1
        sizes["routing"] = replace(settings["routing"], first_layers=max(1, layers - last), last_layers=int(last > 1))
    if settings.get("out_channels") is not None:
        sizes["out_channels"] = 4 * settings["out_channels"] // settings["in_channels"]
    if settings.get("position_embedding") == "learned_3d":
        sizes["max_grid"] = [max(sides) for sides in zip(*tiny_grids(model, tiny_sides(parallel, fp8)))]
    if settings.get("position_embedding") == "rope_3d":
        quarter, axes = HEAD_SIZE // 4, settings.get("rope_axes") or [1]
        middle = [2 * quarter] if len(axes) < 4 else [quarter] * 2
        sizes["rope_axes"] = [quarter, *middle, quarter] if axes[0] else [0, 2 * quarter, 2 * quarter]
    tiny = replace(model, **{name: size for name, size in sizes.items() if settings.get(name) is not None})
    tiny.validate()
    return tiny


def tiny_objective(objective: Objective, model: ModelConfig) -> Objective:
    """Return the objective for the pictures of `tiny_grids`; every term of its loss counts from step 0.

    A discriminator becomes narrow, because some of many activations would be so close to 0 that rounding changes their
    sign and the slope of the leaky ReLU. It has fewer layers if it needs larger pictures. MeanFlow divides a difference
    of predictions by its step, and with it their rounding, so the step becomes large.
    """
    if isinstance(objective, MeanFlow):
        return replace(objective, difference=0.1)
    if isinstance(objective, FlowMatching) and objective.alignment is not None:
        features = getattr(model, "teacher_token_size", None) or HEAD_SIZE
        sizes = Alignment(weight=objective.alignment.weight, layer=1, features=features, hidden_size=2 * HEAD_SIZE)
        return replace(objective, alignment=sizes)
    if not isinstance(objective, Autoencoding | VQAutoencoding) or objective.adversarial is None:
        return objective
    part, side = objective.adversarial, model.patch_spatial * min(min(h, w) for _, h, w in tiny_grids(model))
    while part.num_layers > 1 and part.smallest_side > side:
        part = replace(part, num_layers=part.num_layers - 1)
    part = replace(part, start_step=0, hidden_size=min(part.hidden_size, HEAD_SIZE))
    return replace(objective, adversarial=part)


def pack_tokens(model: ModelConfig, parallel: ParallelConfig, fp8: Optional[Fp8] = None) -> tuple[int, int]:
    """Return the multiple that sample lengths of a tiny pack are padded to, and the number of tokens of the pack.

    A pack has room for 2.5 of the largest samples. Both numbers are the same for all layouts of equally many ranks, so
    that they share the reference.
    """
    multiple = max(4, 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size)
    if fp8 is not None:
        multiple = math.lcm(multiple, _token_multiple(parallel, fp8))
    grids = tiny_grids(model, tiny_sides(parallel, fp8))
    largest = multiple_of(1 if fp8 is None else multiple, max(map(math.prod, grids)))
    return multiple, multiple_of(multiple, 5 * largest // 2)


def _layer_parts(kinds: Sequence[int], tiny_kinds: Sequence[int]) -> list[range]:
    """Return the layers of its kind that each tiny layer stands for.

    Args:
        kinds: borders between the kinds of layers, from 0 to the number of layers; `tiny_kinds` those of the tiny form.
    """
    parts = []
    for (start, stop), (first, last) in zip(pairwise(kinds), pairwise(tiny_kinds)):
        borders = [start + i * (stop - start) // max(1, last - first) for i in range(last - first + 1)]
        parts += [range(low, max(low + 1, high)) for low, high in pairwise(borders)]
    return parts


def _tiny_targets(target: str, parts: Sequence[range]) -> list[str]:
    """Return patterns of the tiny layers that stand for the layers of a pattern.

    In other patterns, such as a UNet's, numbers become `*`.
    """
    match = re.fullmatch(rf"layers\.({_NUMBERS})(?:\.(.*))?", target)
    if match is None or match[1] == "*":
        return [".".join("*" if re.fullmatch(_NUMBERS, part) else part for part in target.split("."))]
    numbers, name = match[1], match[2] or "*"
    rest = f"*{name}" if "*" in numbers else name  # `*` matches dots, too
    layers = [i for i, part in enumerate(parts) if any(fnmatchcase(str(layer), numbers) for layer in part)]
    return [f"layers.{i}.{rest}" for i in layers] or [target]


def _depth(settings: dict[str, Any], parallel: ParallelConfig) -> dict[str, int]:
    """Return the layers of each kind: a multiple of pipeline stages and of the layer pattern, at least two."""
    fewest = 2 if settings.get("routing") is None else 4
    layers = multiple_of(math.lcm(_stages(parallel), len(settings.get("layer_pattern", [None]))), fewest)
    single = layers - layers // 2 if settings.get("num_single_layers") else 0
    depths = {"num_layers": layers, "num_joint_layers": layers - single, "num_single_layers": single}
    return {**depths, "num_dual_layers": min(settings.get("num_dual_layers", 0), 1)}


def _stages(parallel: ParallelConfig) -> int:
    return parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)


def multiple_of(unit: int, at_least: int) -> int:
    """Return the smallest multiple of `unit` that is at least `at_least`."""
    return -(-at_least // unit) * unit
