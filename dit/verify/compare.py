"""Equality of two trainings: a layout's steps and the same steps on one rank, compared once for tests and table.

A training is what a world of ranks reports of it: `losses` and `grad_norms` of every step, `gradients` of the first
step and `parameters` after the last one (global tensors by name), and `drifted`, the parameters whose copies on several
ranks differ.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SUM_RTOL = 1e-5
"""Of losses, gradient norms and gradients in fp32: sums are taken in another order."""

WEIGHT_RTOL = 1e-4
"""Of parameters after the last step: Adam divides by the root of small squared gradients."""

FLOOR = 1e-2
"""Share of the largest norm, see `tensor_errors`."""

BOUNDS = {"losses": SUM_RTOL, "grad_norms": SUM_RTOL, "gradients": SUM_RTOL, "parameters": WEIGHT_RTOL}
"""What is compared, and the largest relative error of one step or one parameter."""

Values = Mapping[str, Tensor] | Sequence[float]


@dataclass(frozen=True)
class Comparison:
    """How a training differs from its reference.

    Attributes:
        errors: for each name of `BOUNDS`, the relative error of each step or parameter.
        drifted: parameters whose copies on several ranks differ after the last step.
    """

    errors: Mapping[str, Mapping[str, float]]
    drifted: tuple[str, ...]

    @property
    def differences(self) -> tuple[str, ...]:
        """What is not equal, one line each; empty if the trainings are equal."""
        found = [
            f"{kind} of {name}: relative error {error:.2e}, above {BOUNDS[kind]:.0e}"
            for kind, errors in self.errors.items()
            for name, error in errors.items()
            if not error <= BOUNDS[kind]  # also where it is NaN
        ]
        return (*found, *(f"{name}: its copies differ between ranks" for name in self.drifted))

    def largest(self, kind: str) -> float:
        """Return the largest error of a name of `BOUNDS`, NaN if there is one."""
        return largest_error(self.errors[kind].values())


def compare_training(one: Mapping[str, Any], many: Mapping[str, Any]) -> Comparison:
    """Compare a layout's training with the same training on one rank.

    Args:
        one: the training on one rank.
        many: the training under a layout.
    """
    return Comparison({kind: relative_errors(one[kind], many[kind]) for kind in BOUNDS}, tuple(many["drifted"]))


def relative_errors(expected: Values, given: Values) -> dict[str, float]:
    """Return `|given - expected| / |expected|` by parameter, or by step for a list of numbers.

    Infinite where one side lacks the value or its shape differs; NaN or infinite where it is not a finite number, or
    zero in `expected`, since a comparison with zero shows nothing.

    Raises:
        ValueError: there is nothing to compare.
    """
    expected_by_name, given_by_name = _named(expected), _named(given)
    names = [*expected_by_name, *(name for name in given_by_name if name not in expected_by_name)]
    if not names:
        raise ValueError("0 values to compare; record at least one step and one parameter")
    return {name: _relative_error(expected_by_name.get(name), given_by_name.get(name)) for name in names}


def tensor_errors(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, float]:
    """Return `|given - expected| / |expected|` by name; 0 for equal bits.

    A norm below `FLOOR` of the largest one counts as that much, because it may be a rounding error of zero: so is the
    gradient of a bias of keys. A value that only one side has differs by infinity.
    """
    floor = FLOOR * max(float(x.norm()) for x in expected.values())
    errors = {}
    for name in {**expected, **given}:
        one, other = expected.get(name), given.get(name)
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


def _relative_error(expected: Tensor | None, given: Tensor | None) -> float:
    if expected is None or given is None or expected.shape != given.shape:
        return math.inf
    return float((given - expected).norm() / expected.norm())
