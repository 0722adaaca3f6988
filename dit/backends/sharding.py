"""Parameter shardings, and the attributes and tables derived from them.

Every parameter has a `ParameterSharding`: the ranks over which it is split or replicated, and the tokens that each
rank's gradient covers. If a gradient covers only some of the tokens, it is summed over the ranks with the other tokens.
Four kinds of parameters on four ranks with TP 2 + SP and PP 2:

                        linear_qkv.weight    norm.weight     null text token   conditioner.time
                        split_dim=0          (the default)   all_tokens,       every_stage
                                                             every_stage
    stage 0   tp 0      rows of heads 0      copy, tokens    copy, all text    copy, tokens of shard 0 in layer 0
              tp 1      rows of heads 1      of its shard    copy, all text    copy, tokens of shard 1 in layer 0
    stage 1   tp 0      (has layer 1)        (has layer 1)   copy, all text    copy, tokens of shard 0 in layer 1
              tp 1                                           copy, all text    copy, tokens of shard 1 in layer 1
    gradient summed     -                    TP              PP                TP and PP
    over DP x CP and

Parameters before a `GatheredLinear` (modulations) differ: a rank's gradient covers the local features of all tokens.
The sum over TP is the same.

Megatron-Core reads eight attributes of a parameter; a missing attribute means its default. Only `write_attributes` sets
them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Optional

from torch import Tensor, nn

from dit.errors import ConfigError

Axis = Literal["tp", "pp", "dp_cp", "expert_dp"]
"""Ranks that differ in one index: tensor parallel, pipeline, data x context parallel, data parallel of the experts."""

GradientCovers = Literal["all_tokens", "sequence_shard", "own_heads"]


@dataclass(frozen=True)
class Matrices:
    """The matrices that a two-dimensional weight of a block stores; an optimizer such as Muon handles each separately.

    Along one dimension, the weight repeats a pattern of runs, in which the rows of one or several matrices alternate:

        runs ((2, 1), (1, 1), (1, 1))    rows 0 0 1 2 | 0 0 1 2 | ...    queries, keys, values by group of heads
        runs ((2, 2),)                   rows 0 1 | 0 1 | 0 1 | ...      gates and values of SwiGLU

    Attributes:
        runs: rows of each run of the pattern, and the number of matrices that alternate in it.
        dim: the dimension; 1 if columns are ordered by the pattern.
    """

    runs: tuple[tuple[int, int], ...] = ((1, 1),)
    dim: int = 0

    def views(self, weight_OI: Tensor) -> list[Tensor]:
        """Return a view of each matrix of a weight, `[repetitions, rows, columns]`; of its transpose for `dim` 1."""
        lengths = [length for length, _ in self.runs]
        runs = weight_OI.movedim(self.dim, 0).unflatten(0, (-1, sum(lengths))).split(lengths, 1)
        return [run[:, i::count] for run, (_, count) in zip(runs, self.runs) for i in range(count)]


ONE_MATRIX = Matrices()


@dataclass(frozen=True)
class ParameterSharding:
    """Placement of one parameter on the ranks, and the tokens that each rank's gradient covers.

    Attributes:
        split_dim: dimension that is split over the tensor-parallel ranks; None if the parameter is replicated.
        expert: whether the parameter belongs to an expert, which is unsharded on the ranks that have it.
        gradient_covers: part of the gradient on each tensor-parallel rank, for a replicated parameter.
            `sequence_shard`: the tokens of the rank's shard under sequence parallelism, all tokens without it.
            `all_tokens`: all tokens, because the input of the parameter is never sharded (text).
            `own_heads`: the attention heads of the rank. Megatron-Core identifies these query and key norms by name.
        every_stage: whether every pipeline stage has a copy, used by the layers of that stage.
        matrices: the matrices of a weight of a block; None for other parameters.
    """

    split_dim: Optional[int] = None
    expert: bool = False
    gradient_covers: GradientCovers = "sequence_shard"
    every_stage: bool = False
    matrices: Optional[Matrices] = None

    def __post_init__(self) -> None:
        assert not (self.expert and (self.split_dim is not None or self.every_stage)), self

    @property
    def is_split(self) -> bool:
        """Whether each tensor-parallel rank has a different part."""
        return self.split_dim is not None

    @property
    def data_axis(self) -> Axis:
        """Ranks with the same part and different samples or tokens."""
        return "expert_dp" if self.expert else "dp_cp"

    @property
    def replicated_over(self) -> tuple[Axis, ...]:
        """Axes over which the parameter is replicated; `data_axis` comes first."""
        tensor: tuple[Axis, ...] = () if self.is_split or self.expert else ("tp",)
        stages: tuple[Axis, ...] = ("pp",) if self.every_stage else ()
        return (self.data_axis, *tensor, *stages)

    def reduced_over(self, *, sequence_parallel: bool) -> tuple[Axis, ...]:
        """Return the axes over which gradients are summed, because each rank's gradient is partial."""
        sharded = self.gradient_covers == "sequence_shard" and sequence_parallel
        partial = sharded or self.gradient_covers == "own_heads"
        return tuple(axis for axis in self.replicated_over if axis != "tp" or partial)

    def global_shape(self, shape: Sequence[int], tp_size: int) -> tuple[int, ...]:
        """Return the unsharded shape."""
        return tuple(size * tp_size if i == self.split_dim else size for i, size in enumerate(shape))

    def origin(self, shape: Sequence[int], tp_rank: int) -> tuple[int, ...]:
        """Return the index of a rank's first element in the unsharded parameter."""
        return tuple(size * tp_rank if i == self.split_dim else 0 for i, size in enumerate(shape))


def adapter_shardings(base: ParameterSharding) -> tuple[ParameterSharding, ParameterSharding]:
    """Return the shardings of A `[rank, in]` and B `[out, rank]` of a low-rank adapter of a weight `[out, in]`.

    A is split as the inputs of the weight are, B as its outputs are; gradients cover the same tokens:

        base                            A                                    B
        column parallel, split_dim=0    replicated; covers sequence shard    split_dim=0
                                        (all_tokens: input is replicated)
        row parallel, split_dim=1       split_dim=1                          replicated; covers sequence shard
        replicated                      as the base                          as the base
        expert                          as the base                          as the base

    A weight whose rows store several matrices has one A, and a B for each of them; with columns, one B.
    """
    a = replace(base, split_dim=None) if base.split_dim == 0 else base
    b = replace(base, split_dim=None) if base.split_dim == 1 else base
    if base.matrices is not None:
        a, b = (x if base.matrices.dim == dim else replace(x, matrices=Matrices()) for x, dim in ((a, 1), (b, 0)))
    return a, b


def set_sharding(parameter: nn.Parameter, sharding: ParameterSharding) -> nn.Parameter:
    """Set the sharding of a parameter, replacing an earlier one."""
    parameter.sharding = sharding  # type: ignore[attr-defined]
    return parameter


def set_matrices(linear: nn.Module, matrices: Matrices) -> None:
    """Set the matrices that the weight of a linear layer of a block stores."""
    weight = linear.get_parameter("weight")
    set_sharding(weight, replace(sharding_of(weight), matrices=matrices))


def replicate_on_all_stages(parameters: Iterable[nn.Parameter]) -> None:
    """Set `every_stage` in the shardings of these parameters."""
    for parameter in parameters:
        set_sharding(parameter, replace(sharding_of(parameter), every_stage=True))


def sharding_of(parameter: Tensor, name: str = "") -> ParameterSharding:
    """Return the sharding of a parameter."""
    sharding = getattr(parameter, "sharding", None)
    if not isinstance(sharding, ParameterSharding):
        raise ConfigError(
            f"parameter {name or '(unnamed)'} of shape {tuple(parameter.shape)} has no sharding, so the ranks over "
            "which to sum its gradient are unknown; build it with the LayerProvider, or call "
            "dit.backends.sharding.set_sharding(parameter, ParameterSharding(...))"
        )
    return sharding


def megatron_attributes(
    sharding: ParameterSharding, *, sequence_parallel: bool, pipeline: bool, first_stage: bool
) -> dict[str, bool | int]:
    """Return the attributes that Megatron-Core reads from a parameter."""
    copies = pipeline and sharding.every_stage
    return {
        # The gradient norm counts a replicated parameter only on the first tensor-parallel rank.
        "tensor_model_parallel": sharding.is_split,
        "partition_dim": -1 if sharding.split_dim is None else sharding.split_dim,
        "partition_stride": 1,
        # Gradients are summed over the tensor-parallel ranks.
        "sequence_parallel": "tp" in sharding.reduced_over(sequence_parallel=sequence_parallel) and sequence_parallel,
        # True: gradients are reduced over data x context parallel ranks; False: over the ranks with the same expert.
        "allreduce": not sharding.expert,
        # Gradients are summed over the pipeline, if the config has `has_cond_embedder=True`.
        "pipeline_parallel": sharding.every_stage,
        # The gradient norm does not count this copy.
        "shared": copies and not first_stage,
        # A separate bucket, so that the distributed optimizer shards all copies in the same way. Gradients are summed
        # over the pipeline after reduce-scatter, so a data-parallel rank must have the same elements of every copy.
        "shared_embedding": copies,
    }


def write_attributes(
    module: nn.Module, *, sequence_parallel: bool, pipeline: bool, first_stage: bool, sums_head_norms: bool
) -> None:
    """Set Megatron-Core's attributes on every parameter of a model chunk, derived from its sharding.

    Args:
        sums_head_norms: `qk_layernorm` of Megatron-Core's config.
    """
    for name, parameter in module.named_parameters():
        sharding = sharding_of(parameter, name)
        summed_by_name = sums_head_norms and ("q_layernorm" in name or "k_layernorm" in name)
        if sharding.gradient_covers == "own_heads" and not summed_by_name:
            raise ConfigError(
                f"the gradient of parameter {name} covers the heads of one tensor-parallel rank, but Megatron-Core "
                "sums such gradients only for parameters named q_layernorm or k_layernorm, and only with qk_layernorm "
                "in its config; rename it and return qk_layernorm=True from megatron_sizes(), or split it "
                "(split_parameter)"
            )
        attributes = megatron_attributes(
            sharding, sequence_parallel=sequence_parallel, pipeline=pipeline, first_stage=first_stage
        )
        for attribute, value in attributes.items():
            setattr(parameter, attribute, value)


def write_shard_attributes(owner: Tensor, sharding: ParameterSharding) -> None:
    """Set the attributes of a Megatron-FSDP shard that differ from those of its parameter.

    The gradient norm must count an expert on every tensor-parallel rank, because each rank has different experts.
    """
    if sharding.expert:
        owner.tensor_model_parallel = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class AxisSizes:
    """Numbers of ranks of a layout.

    Attributes:
        experts: number of ranks over which the experts of a layer are split.
    """

    ranks: Mapping[Axis, int] = field(default_factory=dict)
    experts: int = 1
    sequence_parallel: bool = False

    def named(self, axes: Sequence[Axis], notes: Optional[Mapping[Axis, str]] = None) -> str:
        """Return the axes that have several ranks as text, such as "TP 2, PP 4"; "-" for none."""
        several = [axis for axis in _NAMES if axis in axes and self.ranks.get(axis, 1) > 1]
        return ", ".join(f"{_NAMES[axis]} {self.ranks[axis]}{(notes or {}).get(axis, '')}" for axis in several) or "-"


_NAMES: dict[Axis, str] = {"tp": "TP", "pp": "PP", "dp_cp": "DP x CP", "expert_dp": "expert DP"}
_PARTS = {"sequence_shard": " (sequence shards)", "own_heads": " (own heads)"}
HEADS = ("parameter", "global shape", "split over", "replicated over", "gradient reduced over")
FROZEN = "frozen"
"""Shown instead of a reduction for a parameter that is not trained."""


class Row(NamedTuple):
    """A row of the table of `explain`, in the order of `HEADS`."""

    name: str
    shape: str
    split: str
    replicated: str
    reduced: str


def describe(name: str, parameter: Tensor, sizes: AxisSizes) -> Row:
    """Return the row of the sharding table for a parameter of the full model."""
    sharding = sharding_of(parameter, name)
    split = "-"
    if sharding.expert and sizes.experts > 1:
        split = f"EP {sizes.experts}, by expert"
    elif sharding.is_split and sizes.ranks.get("tp", 1) > 1:
        split = f"TP {sizes.ranks['tp']}, dim {sharding.split_dim}"
    reduced = sharding.reduced_over(sequence_parallel=sizes.sequence_parallel)
    notes: dict[Axis, str] = {"tp": _PARTS.get(sharding.gradient_covers, ""), "pp": " (stages)"}
    return Row(
        name,
        " x ".join(map(str, parameter.shape)),
        split,
        sizes.named(sharding.replicated_over),
        sizes.named(reduced, notes) if parameter.requires_grad else FROZEN,
    )


def explain(model: nn.Module, sizes: AxisSizes) -> str:
    """Return a table of the ranks over which each parameter is split, replicated and reduced.

    Parameters that differ only in the number of their layer or expert share a line, `layers.0-27.mlp...`.
    """
    rows = (describe(name, parameter, sizes) for name, parameter in model.named_parameters())
    return in_columns([HEADS, *_folded(rows)])


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as aligned lines of text."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _folded(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Merge rows whose names differ only in numbers."""
    groups: dict[tuple[str, ...], list[list[int]]] = {}
    for name, *cells in rows:
        numbers = [int(number) for number in re.findall(r"\.(\d+)\.", name)]
        groups.setdefault((re.sub(r"\.\d+\.", ".{}.", name), *cells), []).append(numbers)
    for (pattern, *cells), members in groups.items():
        yield (pattern.format(*(_ranges(sorted(set(column))) for column in zip(*members))), *cells)


def _ranges(numbers: Sequence[int]) -> str:
    """Format 0, 1, 2, 5 as "0-2,5"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends))
