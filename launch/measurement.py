"""Metrics of `launch.evaluate`: their description and their result."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dit.inference.generator import Generator


@dataclass(frozen=True)
class Metric:
    """A metric of `launch.evaluate`.

    Attributes:
        measure: measures the generator of a checkpoint; every rank calls it.
        add_arguments: adds the flags that only this metric reads; metrics may share one function.
        more_is_better: whether `--minimum` applies to this metric.
        by_condition: whether it draws samples of classes or texts, which a cascade can draw, too; other metrics read
            held-out data.
        takes_reference: whether it draws them if `--reference` names real pictures.
        draws: whether it measures generated samples.
    """

    summary: str
    measure: Callable[[argparse.Namespace, "Generator"], "Measurement"]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    more_is_better: bool = True
    by_condition: bool = False
    takes_reference: bool = False
    draws: bool = True


@dataclass(frozen=True)
class Measurement:
    """The result of one metric.

    Attributes:
        missed: one line for each minimum that was not reached; the command then exits with 1.
    """

    lines: list[str]
    record: dict[str, Any]
    missed: list[str] = field(default_factory=list)
