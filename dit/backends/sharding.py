"""One statement of sharding per parameter, and all that is derived from it.

A statement specifies over which ranks a parameter is split, over which it is replicated, and which tokens each rank's
gradient covers. If it covers a part of the tokens, gradients are summed over the ranks that have the other parts.
Four kinds of parameters on four ranks with TP 2 + SP and PP 2:

                        linear_qkv.weight    norm.weight     null text token   conditioner.time
                        split_dim=0          (the default)   all_tokens,       every_stage
                                                             every_stage
    stage 0   tp 0      rows of heads 0      copy, tokens    copy, all text    copy, tokens of shard 0 in layer 0
              tp 1      rows of heads 1      of its shard    copy, all text    copy, tokens of shard 1 in layer 0
    stage 1   tp 0      (has layer 1)        (has layer 1)   copy, all text    copy, tokens of shard 0 in layer 1
              tp 1                                           copy, all text    copy, tokens of shard 1 in layer 1
    gradient summed     nowhere              TP              PP                TP and PP
    besides DP x CP

Before a `GatheredLinear` (modulations) a rank's gradient covers its own features instead, of all tokens: the sum over
TP is the same.

Megatron-Core reads this from eight attributes of a parameter; a missing attribute means its default.
`write_attributes` derives all of them; nothing else in this project sets one.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Optional

from torch import Tensor, nn

from dit.errors import ConfigError

Axis = Literal["tp", "pp", "dp_cp", "expert_dp"]
"""Ranks that differ in one index: tensor parallel, pipeline, data x context parallel, those with the same experts."""

GradientCovers = Literal["all_tokens", "sequence_shard", "own_heads"]


@dataclass(frozen=True)
class ParameterSharding:
    """On which ranks one parameter is placed, and which tokens each rank's gradient covers.

    Attributes:
        split_dim: dimension that is split over the tensor-parallel ranks; None if it is replicated over them.
        expert: one expert of a layer, complete on the ranks that have it.
        gradient_covers: of a parameter that is replicated over tensor-parallel ranks: `sequence_shard`, the tokens of
            this rank's shard under sequence parallelism, and all tokens without it; `all_tokens`, always, because the
            input of the parameter is never sharded (text); `own_heads`, the attention heads of this rank
            (Megatron-Core identifies these norms of queries and keys by their names).
        every_stage: every pipeline stage has a copy and uses it in its own layers.
    """

    split_dim: Optional[int] = None
    expert: bool = False
    gradient_covers: GradientCovers = "sequence_shard"
    every_stage: bool = False

    def __post_init__(self) -> None:
        assert not (self.expert and (self.split_dim is not None or self.every_stage)), self

    @property
    def is_split(self) -> bool:
        """Whether each tensor-parallel rank has a part of its own."""
        return self.split_dim is not None

    @property
    def data_axis(self) -> Axis:
        """Ranks that have the same part and other samples or tokens."""
        return "expert_dp" if self.expert else "dp_cp"

    @property
    def replicated_over(self) -> tuple[Axis, ...]:
        """Axes whose ranks have equal copies; `data_axis` comes first."""
        tensor: tuple[Axis, ...] = () if self.is_split or self.expert else ("tp",)
        stages: tuple[Axis, ...] = ("pp",) if self.every_stage else ()
        return (self.data_axis, *tensor, *stages)

    def reduced_over(self, *, sequence_parallel: bool) -> tuple[Axis, ...]:
        """Return the axes over which gradients are summed, because each rank's gradient covers a part."""
        sharded = self.gradient_covers == "sequence_shard" and sequence_parallel
        partial = sharded or self.gradient_covers == "own_heads"
        return tuple(axis for axis in self.replicated_over if axis != "tp" or partial)

    def global_shape(self, shape: Sequence[int], tp_size: int) -> tuple[int, ...]:
        """Return the shape of the complete parameter.

        Args:
            shape: of one tensor-parallel rank's part.
        """
        return tuple(size * tp_size if i == self.split_dim else size for i, size in enumerate(shape))

    def origin(self, shape: Sequence[int], tp_rank: int) -> tuple[int, ...]:
        """Return the index of a rank's first element in the complete parameter.

        Args:
            shape: of one tensor-parallel rank's part.
        """
        return tuple(size * tp_rank if i == self.split_dim else 0 for i, size in enumerate(shape))


def adapter_shardings(base: ParameterSharding) -> tuple[ParameterSharding, ParameterSharding]:
    """Return the statements of A `[rank, in]` and B `[out, rank]` of a low-rank adapter beside a weight `[out, in]`.

    A is split over what the inputs are split over, B over what the outputs are; the tokens are those of the weight:

        base                            A                                    B
        column parallel, split_dim=0    replicated; covers sequence shard    split_dim=0
                                        (all_tokens: input is replicated)
        row parallel, split_dim=1       split_dim=1                          replicated; covers sequence shard
        replicated                      as the base                          as the base
        expert                          as the base                          as the base
    """
    a = replace(base, split_dim=None) if base.split_dim == 0 else base
    b = replace(base, split_dim=None) if base.split_dim == 1 else base
    return a, b


def set_sharding(parameter: nn.Parameter, sharding: ParameterSharding) -> nn.Parameter:
    """Set the sharding of a parameter; it replaces an earlier one."""
    parameter.sharding = sharding  # type: ignore[attr-defined]
    return parameter


def replicate_on_all_stages(parameters: Iterable[nn.Parameter]) -> None:
    """Add to the statements of these parameters that every pipeline stage has a copy."""
    for parameter in parameters:
        set_sharding(parameter, replace(sharding_of(parameter), every_stage=True))


def sharding_of(parameter: Tensor, name: str = "") -> ParameterSharding:
    """Return the statement of a parameter.

    Args:
        name: of the parameter, for the message.

    Raises:
        ConfigError: nothing was stated.
    """
    sharding = getattr(parameter, "sharding", None)
    if not isinstance(sharding, ParameterSharding):
        raise ConfigError(
            f"parameter {name or 'without a name'} of shape {tuple(parameter.shape)} has no statement of its sharding, "
            "so it is unknown over which ranks to sum its gradient; build it with the LayerProvider, or call "
            "dit.backends.sharding.set_sharding(parameter, ParameterSharding(...))"
        )
    return sharding


def megatron_attributes(
    sharding: ParameterSharding, *, sequence_parallel: bool, pipeline: bool, first_stage: bool
) -> dict[str, bool | int]:
    """Return the attributes that Megatron-Core reads on a parameter.

    Args:
        sequence_parallel: activations between the linear layers are sharded over the tensor-parallel ranks.
        pipeline: the model has several stages.
        first_stage: the parameter is the first stage's.
    """
    copies = pipeline and sharding.every_stage
    return {
        # The gradient norm counts a parameter that is not split on the first tensor-parallel rank alone.
        "tensor_model_parallel": sharding.is_split,
        "partition_dim": -1 if sharding.split_dim is None else sharding.split_dim,
        "partition_stride": 1,
        # Gradients are summed over the tensor-parallel ranks.
        "sequence_parallel": "tp" in sharding.reduced_over(sequence_parallel=sequence_parallel) and sequence_parallel,
        # Gradients are reduced over data x context parallel ranks; else over those with the same expert, and no others.
        "allreduce": not sharding.expert,
        # Gradients are summed over the pipeline, where the config says `has_cond_embedder`.
        "pipeline_parallel": sharding.every_stage,
        # The gradient norm does not count this copy.
        "shared": copies and not first_stage,
        # A bucket of its own: the distributed optimizer then shards all copies in the same way. Gradients are summed
        # over the pipeline after reduce-scatter, so a data-parallel rank must have the same elements of every copy.
        "shared_embedding": copies,
    }


def write_attributes(
    module: nn.Module, *, sequence_parallel: bool, pipeline: bool, first_stage: bool, sums_head_norms: bool
) -> None:
    """Write Megatron-Core's attributes on every parameter of a model chunk, from its statement.

    Args:
        sequence_parallel, pipeline, first_stage: see `megatron_attributes`.
        sums_head_norms: `qk_layernorm` of Megatron-Core's config.

    Raises:
        ConfigError: the sharding of a parameter is not stated, or Megatron-Core does not support it.
    """
    for name, parameter in module.named_parameters():
        sharding = sharding_of(parameter, name)
        summed_by_name = sums_head_norms and ("q_layernorm" in name or "k_layernorm" in name)
        if sharding.gradient_covers == "own_heads" and not summed_by_name:
            raise ConfigError(
                f"the gradient of parameter {name} covers the heads of one tensor-parallel rank, but Megatron-Core "
                "sums such gradients only under the names q_layernorm and k_layernorm, and with qk_layernorm in its "
                "config; name it so and let megatron_sizes() say qk_layernorm=True, or split it (split_vector)"
            )
        attributes = megatron_attributes(
            sharding, sequence_parallel=sequence_parallel, pipeline=pipeline, first_stage=first_stage
        )
        for attribute, value in attributes.items():
            setattr(parameter, attribute, value)


def write_shard_attributes(owner: Tensor, sharding: ParameterSharding) -> None:
    """Set the attributes of a Megatron-FSDP shard that differ from those of its parameter.

    The gradient norm must count an expert on every tensor-parallel rank, because each has other experts.
    """
    if sharding.expert:
        owner.tensor_model_parallel = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class AxisSizes:
    """Ranks of a layout.

    Attributes:
        ranks: by axis; an axis left out has one.
        experts: ranks over which the experts of a layer are split.
        sequence_parallel: activations between the linear layers are sharded over the tensor-parallel ranks.
    """

    ranks: Mapping[Axis, int] = field(default_factory=dict)
    experts: int = 1
    sequence_parallel: bool = False

    def named(self, axes: Sequence[Axis], notes: Optional[Mapping[Axis, str]] = None) -> str:
        """Name those axes that have several ranks, such as "TP 2, PP 4"; "-" for none."""
        several = [axis for axis in _NAMES if axis in axes and self.ranks.get(axis, 1) > 1]
        return ", ".join(f"{_NAMES[axis]} {self.ranks[axis]}{(notes or {}).get(axis, '')}" for axis in several) or "-"


_NAMES: dict[Axis, str] = {"tp": "TP", "pp": "PP", "dp_cp": "DP x CP", "expert_dp": "expert DP"}
_PARTS = {"sequence_shard": " (sequence shards)", "own_heads": " (own heads)"}
HEADS = ("parameter", "global shape", "split over", "replicated over", "gradient reduced over")
FROZEN = "frozen"
"""In place of a reduction: the parameter is not trained."""


@dataclass(frozen=True)
class Row:
    """A row of the table of `explain`, in the order of `HEADS`."""

    name: str
    shape: str
    split: str
    replicated: str
    reduced: str

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.name, self.shape, self.split, self.replicated, self.reduced)


def describe(name: str, parameter: Tensor, sizes: AxisSizes) -> Row:
    """Return how a parameter of the full model is sharded under a layout; a frozen one has no gradient to reduce.

    Raises:
        ConfigError: its sharding is not stated.
    """
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
    """Return a table: over which ranks each parameter is split, replicated, and reduced.

    Parameters that differ only in the number of their layer or expert share a line, `layers.0-27.mlp...`.

    Args:
        model: the full model, as `build_on_meta` builds it.
        sizes: of the layout to explain.

    Raises:
        ConfigError: the sharding of a parameter is not stated.
    """
    rows = [describe(name, parameter, sizes).cells for name, parameter in model.named_parameters()]
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
    """Write 0, 1, 2, 5 as "0-2,5"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends))
