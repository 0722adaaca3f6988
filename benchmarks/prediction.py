"""Plan a step of `benchmarks.step` on an H100, on fake tensors: `python -m benchmarks.prediction --factory NAME`.

The flags are those of `benchmarks.step`, and nothing is timed; docs/planner.md describes the plan.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

from benchmarks import step
from dit.errors import EXIT_OK, one_line_errors
from launch import environment

if TYPE_CHECKING:
    from dit.planner.devices import Device

OTHER_FORMS = ("PCIE", "NVL")
"""Words in the names of cards with other rates than the device of the planner with the same name."""


def device_of(name: str) -> Optional["Device"]:
    """Return the planner's constants of a device, by its CUDA name; None if it is unknown."""
    from dit.planner.devices import DEVICES

    words = name.upper().replace("-", " ").split()
    devices = [device for device in DEVICES.values() if device.name.upper() in words]
    return devices[0] if devices and not any(form in words for form in OTHER_FORMS) else None


def predicted(words: Sequence[str], ranks: int, device: "Device") -> dict[str, Any]:
    """Plan a step of `benchmarks.step`.

    Args:
        words: of that command.

    Returns:
        `planned_ms` of the step, `planned_memory_gib` of the fullest rank, and `planned_for`, the device's name.

    Raises:
        ConfigError: the settings do not fit together.
    """
    from dit.planner.devices import with_fp8
    from dit.planner.job import Job
    from dit.planner.plan import plan, planned_step
    from dit.planner.time import Cluster
    from launch.planned_sample import planned_sample

    config = step.config_of(step.build_parser().parse_args(list(words)), "runs/planned")
    dims, _ = config.check(ranks)
    shape = planned_sample(config.data, config.model).shape(dims)
    parts = config.model, config.objective, config.optimizer, config.parallel, config.training
    step_plan = plan(Job(*parts, shape), dims)
    device = with_fp8(device, config.training.fp8)
    cluster = Cluster(device, ranks, config.parallel)
    return {
        "planned_ms": 1e3 * planned_step(step_plan, dims, cluster).total,
        "planned_memory_gib": step_plan.fullest.peak / 2**30,
        "planned_for": device.name,
    }


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the plan of a step and append it to `--out`."""
    from dit.planner.devices import H100

    words = sys.argv[1:] if argv is None else argv
    args = step.build_parser().parse_args(words)
    environment.prepare()
    record = {"recipe": args.factory, "overrides": args.overrides, "status": "planned", **step.where()}
    step.write(record | predicted(words, environment.world_size(), H100), args.out)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
