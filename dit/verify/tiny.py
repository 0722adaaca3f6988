"""The tiny form of a run: the same backbone, objective and options in sizes of which a step takes milliseconds."""

import math
import re
from dataclasses import fields, replace
from typing import Any

from dit.models.base import ModelConfig
from dit.parallel.dims import ParallelConfig
from dit.patchify import Grid

HEAD_SIZE = 8
"""Features of a head: enough for rotary positions over t, h and w."""

GRIDS = ((1, 4, 4), (2, 2, 4), (1, 2, 2), (1, 2, 4), (3, 2, 2))
"""Patches along t, h and w of the samples, so that those of one pack differ in length."""


def tiny_grids(model: ModelConfig) -> tuple[Grid, ...]:
    """Return the shapes of the samples: of one shape where the backbone takes no others in a micro-batch.

    Pictures that a backbone halves are large enough to be 2 x 2 in the end: among fewer positions nothing is learned of
    queries and keys.
    """
    if model.supports.mixed_shapes:
        return GRIDS
    side = max(4, 2 ** (model.halvings + 1))
    return ((1, side, side),)


def tiny_model(model: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Shrink widths, depths and counts to the smallest that the layout can split; every other option stays.

    Fields are recognised by the names that backbones share. Conditions are dropped for 30 % or 50 % of the samples, so
    that the learned parameters in place of a dropped condition have a gradient.

    Raises:
        ConfigError: the backbone does not take the tiny sizes.
    """
    given = {field.name: getattr(model, field.name) for field in fields(model)}
    exchanged = parallel.context_parallel_size if parallel.context_comm.startswith("a2a") else 1
    unit = parallel.tensor_model_parallel_size * exchanged  # heads are split by this
    grouped = given.get("num_query_groups") not in (None, given.get("num_attention_heads"))
    is_fourfold = given.get("ffn_hidden_size") == 4 * given.get("hidden_size", 0)  # public classes have no other
    groups = multiple_of(unit, 2)
    heads = 2 * groups if grouped else multiple_of(unit, 4)
    sizes: dict[str, Any] = {
        "hidden_size": heads * HEAD_SIZE,
        "num_attention_heads": heads,
        "num_query_groups": groups if grouped else None,
        "ffn_hidden_size": 4 * HEAD_SIZE * heads if is_fourfold else 12 * heads,
        "moe_ffn_hidden_size": 12 * heads,
        "in_channels": 4,
        "num_classes": 5,
        "context_size": 12,
        "pooled_size": 6,
        "latent_channels": 4,
        **{name: [HEAD_SIZE] * len(given.get(name) or ()) for name in ("block_out_channels", "mid_out_channels")},
        "norm_num_groups": HEAD_SIZE // 2,
        **_levels(),
        "adaln_lora_rank": 4,
        "class_dropout": model.class_dropout if model.num_classes is None else 0.3,
        "context_dropout": model.context_dropout if model.context_size is None else 0.5,
        **_depth(given, parallel),
        **_experts(given, parallel),
    }
    if given.get("lora") is not None:
        sizes["lora"] = replace(given["lora"], targets=[_of_any_layer(target) for target in given["lora"].targets])
    if given.get("out_channels") is not None:
        sizes["out_channels"] = 4 * given["out_channels"] // given["in_channels"]
    if given.get("position_embedding") == "learned_3d":
        sizes["max_grid"] = [max(sides) for sides in zip(*GRIDS)]
    if given.get("position_embedding") == "rope_3d":
        sizes["rope_axes"] = [HEAD_SIZE // 4, HEAD_SIZE // 2, HEAD_SIZE // 4]
    tiny = replace(model, **{name: size for name, size in sizes.items() if given.get(name) is not None})
    tiny.validate()
    return tiny


def tiny_layout(parallel: ParallelConfig) -> ParallelConfig:
    """Return the layout without what is counted in layers of the real model."""
    return replace(parallel, pipeline_layers=None)


def pack_tokens(model: ModelConfig, parallel: ParallelConfig) -> tuple[int, int]:
    """Return what the samples of a tiny pack are padded to a multiple of, and the tokens of the pack.

    A pack has room for two and a half of the largest samples. Both numbers fit the layout, and layouts of equally many
    ranks have the same, so that they share the reference.
    """
    multiple = max(4, 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size)
    return multiple, multiple_of(multiple, 5 * max(map(math.prod, tiny_grids(model))) // 2)


def _of_any_layer(target: str) -> str:
    """Return a pattern with any layer in place of a numbered one: `layers.20.*` names none of the tiny form."""
    return ".".join("*" if re.fullmatch(r"[\d?!*\[\]-]+", part) else part for part in target.split("."))


def _depth(given: dict[str, Any], parallel: ParallelConfig) -> dict[str, int]:
    """Return layers of each kind: one for each stage of the pipeline, full repeats of a pattern, at least two."""
    stages = parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
    layers = multiple_of(math.lcm(stages, len(given.get("layer_pattern", [None]))), 2)
    return {"num_layers": layers, "num_joint_layers": layers // 2, "num_single_layers": layers - layers // 2}


def _levels() -> dict[str, Any]:
    """Return the levels of a UNet: two, with attention at the lower one."""
    return {
        "channel_multipliers": [1, 2],
        "num_res_blocks": [1, 1],
        "attention_levels": [1],
        "head_size": HEAD_SIZE,
        "condition_size": 2 * HEAD_SIZE,
        "low_resolution_factor": 2,
    }


def _experts(given: dict[str, Any], parallel: ParallelConfig) -> dict[str, Any]:
    """Return the number of experts, and choices among no more than these."""
    experts = multiple_of(parallel.expert_model_parallel_size, 4)
    return {
        "num_experts": experts,
        **{name: min(given[name], experts) for name in ("moe_top_k", "moe_capacity_factor") if name in given},
    }


def multiple_of(unit: int, at_least: int) -> int:
    """Return the smallest multiple of a unit that is large enough."""
    return -(-at_least // unit) * unit
