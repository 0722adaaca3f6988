"""What the planner predicts for a measurement: the same settings, traced on fake tensors, on the device's constants."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

from benchmarks import step

if TYPE_CHECKING:
    from dit.planner.devices import Device

NODE = 8
"""GPUs of a node, at most."""
OTHER_FORMS = ("PCIE", "NVL")
"""Words of cards that share a name with a device of the planner, and have other rates."""


def device_of(name: str) -> Optional["Device"]:
    """Return the planner's constants of a device, by its name as CUDA states it; None if it has none."""
    from dit.planner.devices import DEVICES

    words = name.upper().replace("-", " ").split()
    known = [device for device in DEVICES.values() if device.name.upper() in words]
    return known[0] if known and not any(other in words for other in OTHER_FORMS) else None


def predicted(words: Sequence[str], ranks: int, device: "Device") -> dict[str, Any]:
    """Plan a step of `benchmarks.step`.

    Args:
        words: of that command.

    Returns:
        `planned_ms` of the step, `planned_memory_gib` of the fullest rank, and `planned_for`, the device's name.

    Raises:
        ConfigError: the settings do not fit together.
    """
    from dit.planner.plan import plan
    from dit.planner.step import planned_step
    from dit.planner.time import Cluster
    from launch.planned_sample import sample_of

    config = step.config_of(step.build_parser().parse_args(list(words)), "runs/planned")
    dims, _ = config.check(ranks)
    shape = sample_of(config.data, config.model).shape(dims)
    found = plan(config.model, config.objective, config.optimizer, config.parallel, config.training, shape, dims)
    cluster = Cluster(device, ranks, config.parallel, min(NODE, ranks))
    return {
        "planned_ms": 1e3 * planned_step(found, dims, cluster).time.total,
        "planned_memory_gib": found.fullest.peak / 2**30,
        "planned_for": device.name,
    }
