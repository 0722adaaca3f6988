"""Report of a comparison of one rank with a layout: the first wrong gradient and its parameter's declared sharding."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn

from dit.backends.sharding import HEADS, Axis, AxisSizes, ParameterSharding, Row, describe, in_columns, sharding_of
from dit.boxes import Box
from dit.errors import first_few
from dit.parallel.dims import ParallelConfig, ParallelDims
from dit.verify.compare import BOUNDS, Comparison, compare_training
from dit.verify.trial import LocalValues

MOST_ROWS, MOST_NAMES = 20, 4


def axis_sizes(parallel: ParallelConfig, dims: ParallelDims) -> AxisSizes:
    """Return the sizes of a layout's axes."""
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    dp_cp = dims.data_parallel_size * parallel.context_parallel_size
    return AxisSizes(
        {"tp": tp, "pp": parallel.pipeline_model_parallel_size, "dp_cp": dp_cp, "expert_dp": tp * dp_cp // ep},
        experts=ep,
        sequence_parallel=parallel.sequence_parallel,
    )


@dataclass(frozen=True)
class WrongGradient:
    """A parameter whose gradient differs.

    Attributes:
        norm: on one rank.
        ratio: norm under the layout, relative to `norm`.
        error: norm of the difference, relative to `norm` or the floor, see `dit.verify.compare.floored`.
        by_rank: ratio of the values that each rank updates, by the rank's coordinates in the layout; ranks without
            values or gradient are left out.
        row: its row of the sharding table.
    """

    norm: float
    ratio: float
    error: float
    by_rank: Mapping[str, float]
    sharding: ParameterSharding
    row: Row

    @property
    def num_stages(self) -> int:
        return len({stage for place in self.by_rank for stage in re.findall(r"pp \d+", place)})


@dataclass(frozen=True)
class Verdict:
    """Result of comparing a layout with one rank.

    Attributes:
        wrong: gradients that differ, in the order in which the backward pass computes them.
        idle: parameters without a gradient on either side; they are not verified.
        frozen: number of frozen parameters; losses and other gradients cover their forward computation.
    """

    comparison: Comparison
    wrong: tuple[WrongGradient, ...]
    compared: int
    idle: tuple[str, ...]
    frozen: int
    sizes: AxisSizes

    @property
    def is_equal(self) -> bool:
        return not self.comparison.differences

    def text(self) -> str:
        bounds = self.comparison.bounds.items()
        kinds = [f"{kind} {self.comparison.largest(kind):.1e} (bound {bound:.0e})" for kind, bound in bounds]
        lines = [f"largest relative errors: {', '.join(kinds)}"]
        if self.idle:
            lines.append(f"no gradient on either side, so not verified: {', '.join(self.idle)}")
        if self.frozen:
            lines.append(f"frozen: {self.frozen} parameters, which have no gradient")
        if self.is_equal:
            return "\n".join([*lines, f"equal: {self.compared} gradients, losses, weights and their copies"])
        lines += self._first() if self.wrong else []
        return "\n".join([*lines, "", *self._others()])

    def _others(self) -> list[str]:
        """List differences other than gradients; after a wrong gradient, later steps and weights always differ."""
        lines = []
        for kind, quantity in (
            ("losses", "loss"),
            ("grad_norms", "gradient norm"),
            ("parameters", "weight after the steps"),
            ("averages", "weight average after the steps"),
        ):
            errors = self.comparison.wrong(kind) if kind in self.comparison.errors else {}
            if errors:
                lines.append(
                    f"{quantity}: {len(errors)} of {len(self.comparison.errors[kind])} differ: {_listed(errors)}"
                )
        if self.comparison.drifted:
            lines.append(f"copies that differ between ranks: {_listed(dict.fromkeys(self.comparison.drifted))}")
        if self.comparison.inexact:
            lines.append(f"after the updates: {_listed(dict.fromkeys(self.comparison.inexact))}")
        return lines

    def _first(self) -> list[str]:
        first, heads = self.wrong[0], ("ratio", "error", *HEADS)
        rows = [(f"{w.ratio:.3f}", f"{w.error:.1e}", *w.row) for w in self.wrong[:MOST_ROWS]]
        ranks = "; ".join(f"{place or 'the rank'}: {ratio:.3f}" for place, ratio in first.by_rank.items())
        return [
            "",
            f"first wrong gradient of the backward pass: {first.row.name}",
            f"  stated     split over {first.row.split}; replicated over {first.row.replicated}; "
            f"gradient reduced over {first.row.reduced}",
            f"  norm       {first.norm:.4g} on one rank, {first.ratio:.3f} times that under the layout; "
            f"relative error {first.error:.1e}",
            f"  by rank    {ranks or '-'}",
            f"  reading    {self.reading()}",
            "",
            f"{len(self.wrong)} of {self.compared} gradients differ, those nearest the loss first:",
            in_columns([heads, *rows]),
            *([f"... and {len(self.wrong) - MOST_ROWS} more"] if len(self.wrong) > MOST_ROWS else []),
        ]

    def reading(self) -> str:
        """Return the usual cause of an error with these ratios."""
        first = self.wrong[0]
        if "step 0" in self.comparison.wrong("losses"):
            return "the first loss differs, too: check the forward pass and its sums before the gradients"
        ratios = [wrong.ratio for wrong in self.wrong]
        if len(ratios) == self.compared and max(ratios) - min(ratios) < 1e-3 * max(ratios):
            return (
                f"every gradient is {first.ratio:.3f} times its size: the sharding of parameters is not the cause; "
                "check the scale of the loss and the division by the tokens of the global batch"
            )
        if first.num_stages > 1 and not first.sharding.every_stage:
            return (
                f"{first.num_stages} pipeline stages have a copy and its gradients are not summed: call "
                "replicate_on_all_stages(module.parameters()) (dit/backends/sharding.py) where it is built"
            )
        axes: tuple[Axis, ...] = ("tp", "pp", first.sharding.data_axis)
        fitting = [axis for axis in axes if math.isclose(first.ratio, self.sizes.ranks[axis], rel_tol=0.02)]
        if fitting and first.ratio > 1.5:
            return (
                f"counted {self.sizes.named(fitting)} times: each rank's gradient was complete and the sum over ranks "
                "was taken nevertheless; compare gradient_covers with the input that the parameter is applied to"
            )
        if first.ratio < 0.98:
            return (
                "a part is missing: ranks that have other tokens, heads or layers did not add theirs; compare the "
                "stated sharding with the ranks that differ, and look for a gather whose backward pass keeps one part"
            )
        return "neither missing nor counted twice: check the communication in the backward pass up to this parameter"


def judge(
    one: Mapping[str, Any],
    many: Mapping[str, Any],
    model: nn.Module,
    sizes: AxisSizes,
    bounds: Mapping[str, float] = BOUNDS,
    floor: float = 0.0,
) -> Verdict:
    """Compare the results of `dit.verify.trial.train` on one rank and under a layout."""
    expected: Mapping[str, Tensor] = one["gradients"]
    actual: Mapping[str, Tensor] = many["gradients"]
    idle = [n for n, g in expected.items() if not g.any() and n in actual and not actual[n].any()]
    of_one, of_many = (
        {**side, "gradients": {name: grad for name, grad in side["gradients"].items() if name not in idle}}
        for side in (one, many)
    )
    comparison = compare_training(of_one, of_many, bounds, floor)
    parameters = dict(model.named_parameters())
    wrong = [
        WrongGradient(
            norm=float(expected[name].norm()),
            ratio=float(actual[name].norm() / expected[name].norm()) if name in actual else math.nan,
            error=error,
            by_rank=_by_rank(name, expected[name], many.get("by_rank", {})),
            sharding=sharding_of(parameters[name], name),
            row=describe(name, parameters[name], sizes),
        )
        for name, error in comparison.wrong("gradients").items()
        if name in expected
    ]
    frozen = sum(not parameter.requires_grad for parameter in parameters.values())
    compared = len(comparison.errors["gradients"])
    # `wrong` is in the order of the forward pass.
    return Verdict(comparison, tuple(reversed(wrong)), compared, tuple(idle), frozen, sizes)


def _listed(errors: Mapping[str, Optional[float]]) -> str:
    """List the first few names, with their relative errors."""
    return first_few([name if error is None else f"{name} ({error:.1e})" for name, error in errors.items()], MOST_NAMES)


def _by_rank(name: str, expected: Tensor, ranks: Mapping[str, Sequence[LocalValues]]) -> dict[str, float]:
    """Return the norm of each rank's values, relative to the norm of the same elements on one rank."""
    ratios = {}
    for place, local in ranks.items():
        for part, values in ((part, torch.as_tensor(values)) for other, part, values in local if other == name):
            boxes = [box.slices_in(Box.of(part.shape)) for box, _ in part.views(values, part.start)]
            norm = torch.cat([values.new_zeros(1), *(expected[box].flatten() for box in boxes)]).norm()
            if norm > 0 or values.any():
                ratios[place] = float(values.norm() / norm)
    return ratios
