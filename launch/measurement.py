"""Metrics of `launch.evaluate`: their description, their samples and their result."""

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dit.errors import ConfigError
from energon_data.dataset import EnergonData
from launch import environment
from launch.sample import sampling_settings

if TYPE_CHECKING:
    from dit.conditions import Value
    from dit.inference.generator import Generator


@dataclass(frozen=True)
class Metric:
    """A metric of `launch.evaluate`.

    Attributes:
        summary: its line in the help.
        measure: measures the generator of a checkpoint; every rank calls it.
        add_arguments: adds the flags that only this metric reads; metrics may share one function.
        more_is_better: whether `--minimum` applies to this metric.
        by_condition: whether it draws samples of classes or texts, which a cascade can draw, too; other metrics read
            held-out data.
    """

    summary: str
    measure: Callable[[argparse.Namespace, "Generator"], "Measurement"]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    more_is_better: bool = True
    by_condition: bool = False


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


def folder_to_compare(args: argparse.Namespace, generator: "Generator", names: Collection[str], what: str) -> str:
    """Return the data set whose samples a metric compares with: the flag, else the run's; of a blend, the one member.

    Args:
        names: what suitable data sets call themselves in `dataset.json`.
        what: they hold, for messages.

    Returns:
        Its folder; empty if the run read none.

    Raises:
        ConfigError: the run trained on a blend with several suitable data sets, or none.
        DataError: it cannot be read.
    """
    if args.data:
        return args.data
    data = generator.config.data
    path = getattr(data, "path", "")
    if getattr(data, "blend", None) is None and Path(path).suffix not in (".yaml", ".yml"):
        return path
    assert isinstance(data, EnergonData)  # other data are not blended
    members = {str(member.path): member.description.get("name") in names for member in data.folders("train")}
    readable = [member for member, suits in members.items() if suits]
    if len(readable) != 1:
        raise ConfigError(
            f"the run trained on {data.origin}, a blend with {len(readable)} data sets of {what}, and samples are "
            f"compared with one; name it, as in --data {(readable or list(members))[0]} (the blend has "
            f"{', '.join(members)})"
        )
    return readable[0]


def draw_samples(
    args: argparse.Namespace, generator: "Generator", conditions: "Mapping[str, Sequence[Value]]"
) -> Tensor:
    """Draw a sample for each value of the conditions, as many at a time as fit; every rank calls this.

    The ranks take turns by batch. The batches do not depend on the number of ranks, so neither do the samples, to the
    bit.

    Returns:
        Latents `[N, C, T, H, W]`, all of them on every rank, on its device.
    """
    count, at_once = len(next(iter(conditions.values()))), generator.batch_size(None, None)
    starts = range(0, count, at_once)
    rank, ranks = environment.rank(), environment.world_size()
    drawn = []
    for start in starts[rank::ranks]:
        rows = range(start, min(start + at_once, count))
        given = {name: [values[i] for i in rows] for name, values in conditions.items()}
        drawn.append(generator.generate(conditions=given, numbers=rows, **sampling_settings(args)))
    if ranks == 1:
        return torch.cat(drawn)
    import torch.distributed as dist

    from dit.backends.device import local_device

    of_rank: list[list[Tensor]] = [[]] * ranks
    dist.all_gather_object(of_rank, [latents.cpu() for latents in drawn])
    return torch.cat([of_rank[i % ranks][i // ranks] for i in range(len(starts))]).to(local_device())
