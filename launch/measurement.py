"""What a metric of `launch.evaluate` returns."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """The result of one metric.

    Attributes:
        lines: for people.
        record: the same as plain values, for `--json`.
        missed: one line for each minimum that was not reached; the command then exits with 1.
    """

    lines: list[str]
    record: dict[str, Any]
    missed: list[str] = field(default_factory=list)
