"""Comparison of two training runs: a parallel layout against one rank. Tests and the table of layouts use it.

A training run is the dictionary that rank 0 of a world reports: `losses` and `grad_norms` of every step,
`gradients` of the first step, `parameters` after the last step (unsharded tensors by name), `averages` of them if there
are any, `drifted`, the parameters whose copies differ between ranks, and `inexact`, see `Comparison`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SUM_RTOL = 1e-5
"""Tolerance of losses, gradient norms and fp32 gradients: the order of summation differs."""

WEIGHT_RTOL = 1e-4
"""Tolerance of parameters after the last step: Adam divides by the root of small squared gradients."""

FLOOR = 1e-2
"""Smallest norm that an error is divided by, as a share of the largest norm; see `floored` and `tensor_errors`."""

FP32_FLOOR = 1e-4
"""The same for fp32. The gradient of a single number, such as a gain, may be a sum of large terms that cancel; their
rounding errors do not cancel."""

BOUNDS = {"losses": SUM_RTOL, "grad_norms": SUM_RTOL, "gradients": SUM_RTOL, "parameters": WEIGHT_RTOL}
"""Compared quantities, and the largest accepted relative error of a step or a parameter."""

HALF_BOUNDS = {
    "bf16": {"losses": 0.02, "grad_norms": 0.05, "gradients": 0.15, "parameters": 0.1},
    "fp16": {"losses": 0.003, "grad_norms": 0.01, "gradients": 0.03, "parameters": 0.01},
}
"""The same for a layout that trains in half precision, compared with one rank in fp32, with `FLOOR`."""

FP8_BOUNDS = {"losses": 3e-4, "grad_norms": 1e-3, "gradients": 3e-3, "parameters": 1e-2}
"""The same for two layouts with quantised products in fp32: a sum in another order can round a number differently.

The other neighbour of an 8-bit number is up to 2^-2 of it away, but few numbers are that close to the middle: gradients
differ by up to 2e-4, and by 2e-2 and more if a rank scales its part of a matrix by itself.
"""

Values = Mapping[str, Tensor] | Sequence[float]


@dataclass(frozen=True)
class Comparison:
    """Differences between a training run and its reference.

    Attributes:
        errors: for each compared quantity, the relative error of each step or parameter.
        drifted: parameters whose copies on several ranks differ after the last step.
        inexact: weights and averages of the layout that differ from its main weights.
    """

    errors: Mapping[str, Mapping[str, float]]
    drifted: tuple[str, ...]
    bounds: Mapping[str, float]
    inexact: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[str, ...]:
        """One line for each difference; empty if the runs are equal."""
        lines = [
            f"{kind} of {name}: relative error {error:.2e}, above {self.bounds[kind]:.0e}"
            for kind in self.errors
            for name, error in self.wrong(kind).items()
        ]
        return (*lines, *(f"{name}: its copies differ between ranks" for name in self.drifted), *self.inexact)

    def wrong(self, kind: str) -> dict[str, float]:
        """Return the errors of a quantity that are above its bound or NaN."""
        return {name: error for name, error in self.errors[kind].items() if not error <= self.bounds[kind]}

    def largest(self, kind: str) -> float:
        """Return the largest error of a quantity, NaN if there is one."""
        return largest_error(self.errors[kind].values())


def compare_training(
    one: Mapping[str, Any], many: Mapping[str, Any], bounds: Mapping[str, float] = BOUNDS, floor: float = 0.0
) -> Comparison:
    """Compare training under a layout with the same training on one rank.

    Args:
        floor: see `floored`.
    """
    bounds = {**bounds, "averages": bounds["parameters"]} if "averages" in one else bounds
    errors: dict[str, dict[str, float]] = {}
    for kind in bounds:
        norms = {name: float(value.norm()) for name, value in _named(one[kind]).items()}
        errors[kind] = floored(relative_errors(one[kind], many[kind]), norms, floor)
    return Comparison(errors, tuple(many["drifted"]), bounds, tuple(many.get("inexact", ())))


def floored(errors: Mapping[str, float], norms: Mapping[str, float], floor: float) -> dict[str, float]:
    """Return relative errors that are divided by at least a share `floor` of the largest norm."""
    smallest = floor * max(norms.values(), default=0.0)
    return {
        name: error * norms[name] / smallest if norms.get(name, smallest) < smallest and math.isfinite(error) else error
        for name, error in errors.items()
    }


def relative_errors(expected: Values, actual: Values) -> dict[str, float]:
    """Return `|actual - expected| / |expected|` by parameter, or by step for a list of numbers.

    The error is infinite if one side lacks the value or the shapes differ. It is NaN or infinite if a value is not
    finite or `expected` is zero, since a comparison with zero shows nothing.

    Raises:
        ValueError: both sides are empty.
    """
    expected_by_name, actual_by_name = _named(expected), _named(actual)
    names = [*expected_by_name, *(name for name in actual_by_name if name not in expected_by_name)]
    if not names:
        raise ValueError("0 values to compare; record at least one step and one parameter")
    return {name: _relative_error(expected_by_name.get(name), actual_by_name.get(name)) for name in names}


def tensor_errors(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> dict[str, float]:
    """Return `|actual - expected| / |expected|` by name; 0 for bitwise equal values.

    Norms below `FLOOR` times the largest norm are replaced by that bound, because they may be rounding errors
    of zero (such as the gradient of a key bias). The error is infinite if only one side has the value.
    """
    floor = FLOOR * max(float(x.norm()) for x in expected.values())
    errors = {}
    for name in {**expected, **actual}:
        one, other = expected.get(name), actual.get(name)
        if one is None or other is None or one.shape != other.shape:
            errors[name] = math.inf
        else:
            same = torch.equal(one, other)
            errors[name] = 0.0 if same else float((other - one).norm()) / max(float(one.norm()), floor)
    return errors


def largest_error(errors: Iterable[float]) -> float:
    """Return the largest error, NaN if there is one."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def _named(values: Values) -> Mapping[str, Tensor]:
    if isinstance(values, Mapping):
        return values
    return {f"step {step}": torch.tensor(value, dtype=torch.float64) for step, value in enumerate(values)}


def _relative_error(expected: Tensor | None, actual: Tensor | None) -> float:
    if expected is None or actual is None or expected.shape != actual.shape:
        return math.inf
    return float((actual - expected).norm() / expected.norm())
