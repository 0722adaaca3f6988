"""Start a world of gloo ranks once and run many cases inside it."""

from pathlib import Path
from typing import Any

from dit.verify import ranks

TRAIN = "benchmarks.parallel_training:train"


def run_world(
    world_size: int, cases: list[dict[str, Any]], folder: Path, *, timeout_s: float = 900.0
) -> list[dict[str, Any]]:
    """Run every case as `dit.verify.ranks.run_world` does; a case without a task is a training.

    Raises:
        RuntimeError: a rank failed, or they took too long; the message has the end of their output.
    """
    return ranks.run_world(world_size, [{"task": TRAIN, **case} for case in cases], folder, timeout_s=timeout_s)
