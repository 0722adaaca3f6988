"""Comparison of a run's settings with those of a checkpoint, and which changes allow resuming.

A change of what is trained or of its data (model, objective, data, seed, ...) would make the run another experiment,
and is refused. Other data under the same path count as a change of the setting that names the path. Settings that users
change on purpose (length, learning rate, clipping), and settings that change results only by rounding (layout,
recompute, attention path, intervals, logs), are reported, one line each.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit.config_record import CLASS_KEY, to_record, without_former
from dit.errors import ConfigError
from dit.run_config import RunConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EVERY = "*"
"""All settings of a part, including future ones."""

REPORTED: dict[str, str] = {
    # The stream itself refuses a changed number of streams.
    "data": "num_streams pack_multiple_of background max_lost_samples require_checksums validation_split "
    "validation_samples",
    "optimizer": "lr clip_grad offload",
    "schedule": EVERY,
    "parallel": EVERY,
    # The stream itself refuses a changed micro-batch if that would change the samples of a step.
    "training": "run_dir num_steps micro_batch_size loss_scale initial_loss_scale loss_scale_window attention "
    "deterministic cuda_graph linears kernels recompute recompute_layers ema_offload log_interval validation_interval "
    "sample_interval hooks stop_at_step time_limit on_bad_numbers spike_threshold max_bad_steps recheck_interval "
    "hang_timeout_s",
    "checkpoint": EVERY,
    "logging": EVERY,
    "sampling": EVERY,
}
"""Settings whose change is only reported, by the part of a run; the change of any other setting is refused."""
DATA_ORDER = ("data", "training.seed")
"""The settings that determine the order of samples: a change invalidates the saved position in the data."""


@dataclass(frozen=True)
class Change:
    """A changed setting, such as `optimizer.lr`, or part of the settings whose class changed, such as `objective`."""

    path: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.path}: {self.old} -> {self.new}"

    @property
    def is_refused(self) -> bool:
        """Whether the change would make the run another experiment."""
        part, _, name = self.path.partition(".")
        reported = REPORTED.get(part, "").split()
        return name not in reported and EVERY not in reported

    @property
    def identifies_run(self) -> bool:
        """Whether different values mean different runs: the setting determines the weights or the run folder."""
        return self.is_refused or self.path == "training.run_dir" or self.is_in(("optimizer", "schedule"))

    @property
    def restarts_data(self) -> bool:
        """Whether the change invalidates the saved position in the data."""
        return self.is_refused and self.is_in(DATA_ORDER)

    def is_in(self, paths: Sequence[str]) -> bool:
        """Return whether one of `paths` is this setting or the part that it belongs to."""
        return any(self.path == path or self.path.startswith(f"{path}.") for path in paths)


def changes(saved: Mapping[str, Any], config: RunConfig) -> list[Change]:
    """Return every setting that differs from a checkpoint's record, in the order of the settings.

    A setting that the record lacks (written by an older version) counts as the default value.
    """
    parts = config.parts()
    return [change for name, part in parts.items() for change in _part_changes(name, saved.get(name, {}), part)]


def _part_changes(name: str, saved: Mapping[str, Any], part: "DataclassInstance") -> Iterator[Change]:
    # Compare the class without its module: files move between versions.
    old_class, new_class = saved.get(CLASS_KEY, type(part).__name__).rpartition(".")[2], type(part).__name__
    if old_class != new_class:
        yield Change(name, old_class, new_class)
        return
    saved, new, defaults = without_former(saved), to_record(part), {}
    for field in dataclasses.fields(part):
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = to_record(field.default_factory())
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = to_record(field.default)
    for key in dict.fromkeys([*new, *saved]):
        old, now = saved.get(key, defaults.get(key)), new.get(key, "no longer a setting")
        if key != CLASS_KEY and old != now:
            yield Change(f"{name}.{key}", old, now)


def replaced_data(
    saved: Mapping[str, Mapping[str, str]], current_data: Mapping[str, Mapping[str, str]]
) -> list[Change]:
    """Return a change for each data set whose identity differs from the checkpoint.

    Data sets that only one of the two has are skipped, because a setting changed as well.
    """
    return [
        Change(f"data.{setting}".rstrip("."), f"{name}: {saved[setting][name]}", text)
        for setting, data_sets in current_data.items()
        for name, text in data_sets.items()
        if saved.get(setting, {}).get(name, text) != text
    ]


def check_same_experiment(
    folder: Path,
    saved: Mapping[str, Any],
    config: RunConfig,
    accepted: Sequence[str],
    replaced: Sequence[Change] = (),
) -> list[Change]:
    """Check that resuming from a checkpoint with the settings `saved` continues the same experiment."""
    _check_names(accepted, saved, config)
    all_changes = [*changes(saved, config), *replaced]
    refused = [change for change in all_changes if change.is_refused and not change.is_in(accepted)]
    if refused:
        accept = json.dumps([*accepted, *dict.fromkeys(change.path for change in refused)], separators=(",", ":"))
        raise ConfigError(
            f"{folder} was trained with other settings or data: {'; '.join(map(str, refused))}. Set them back, or "
            "give another training.run_dir (with checkpoint.start_from=this run folder to start from its weights), or "
            f"continue here with 'checkpoint.accept_changes={accept}'"
        )
    return all_changes


def _check_names(accepted: Sequence[str], saved: Mapping[str, Any], config: RunConfig) -> None:
    record = to_record(config.parts())
    names = {f"{name}.{key}" for parts in (record, saved) for name in record for key in parts.get(name, {})}
    unknown_names = [path for path in accepted if path not in names and path not in record]
    if unknown_names:
        raise ConfigError(
            f"checkpoint.accept_changes names {', '.join(unknown_names)}, which this run does not have; write paths of "
            f"settings such as optimizer.beta2, or one of the parts {', '.join(record)}"
        )
