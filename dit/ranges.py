"""Ranges of settings, for checks before anything is built.

The upper limits of integers are far above useful values; they catch typing errors that would exhaust memory or time in
a dry run.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, Optional, TypeVar, get_args, get_origin, get_type_hints

from dit.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value")
RANGE = "range"
"""Key of a field's range in its metadata."""
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^:@]+")


@dataclass(frozen=True)
class Range:
    """An interval of numbers; NaN is outside every interval.

    Attributes:
        whole: integers only.
        open_low, open_high: whether this end is excluded.
    """

    low: float
    high: float
    whole: bool = False
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: object) -> bool:
        kinds = (int,) if self.whole else (int, float)
        if not isinstance(value, kinds):
            return False
        above = self.low < value if self.open_low else self.low <= value
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        words = []
        if self.low > -math.inf:
            words.append(f"above {self.low:,}" if self.open_low else f"of at least {self.low:,}")
        if self.high < math.inf:
            words.append(f"below {self.high:,}" if self.open_high else f"at most {self.high:,}")
        return " ".join([kind, " and ".join(words)]) if words else kind


def whole(low: int, high: int) -> Range:
    """Return the integers from `low` to `high`, both included."""
    return Range(low, high, whole=True)


COUNT = whole(1, 2**31 - 1)
COUNT_OR_ZERO = whole(0, 2**31 - 1)
SEED = whole(0, 2**63 - 1)
RANKS = whole(1, 2**20)
LAYERS = whole(1, 1000)
LAYERS_OR_ZERO = whole(0, 1000)
ASPECTS = ("keep", "square", "buckets")  # of `energon_data.prepare --aspect`
MOST_POSITIONS = 1 << 24  # of one latent or picture: frames x height x width
EXPERTS = whole(1, 4096)
WIDTH = whole(1, 2**20)
PATCHES = whole(1, 2**16)
FINITE = Range(-math.inf, math.inf, open_low=True, open_high=True)
POSITIVE = Range(0, math.inf, open_low=True, open_high=True)
NOT_NEGATIVE = Range(0, math.inf, open_high=True)
LOSS_SCALE = Range(2.0**-24, 2.0**32)
SHARE = Range(0, 1)
SHARE_BELOW_1 = Range(0, 1, open_high=True)
RELATIVE_LENGTH = Range(0.01, 0.28)  # of power-function averages (`dit.optimizer.ema`)
INSIDE_0_1 = Range(0, 1, open_low=True, open_high=True)


def ranged(default: Value, allowed: Range) -> Value:
    """Declare a field of a configuration with a range; a subclass may change the default, and keeps the range."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={RANGE: allowed})  # type: ignore[return-value]
    return field(default=default, metadata={RANGE: allowed})


def check_range(setting: str, value: object, allowed: Range) -> None:
    """Check that one setting is in its range; None passes, and a list if each entry does."""
    entries = value if isinstance(value, list) else [value]
    if any(entry is not None and entry not in allowed for entry in entries):
        kind = "of numbers, each " if isinstance(value, list) else ""
        raise ConfigError(f"{setting}={value} must be {kind}{allowed}")


def check_ranges(part: str, config: "DataclassInstance", others: Optional[Mapping[str, Range]] = None) -> None:
    """Check that the fields of a configuration are in their ranges; None passes, and a list if each entry does.

    Fields of a `Literal` type have one of its values.

    Args:
        part: name of the configuration in overrides, such as `training`.
        others: ranges of fields without a declared one.
    """
    for name, allowed in {**_ranges(type(config)), **(others or {})}.items():
        check_range(f"{part}.{name}", getattr(config, name), allowed)
    for name, choices in _choices(type(config)).items():
        if (value := getattr(config, name)) not in choices:
            raise ConfigError(f"{part}.{name}={value!r} is unknown; use one of {', '.join(map(repr, choices))}")


@cache
def _ranges(settings: type) -> dict[str, Range]:
    """Return the declared ranges of a class and its base classes."""
    classes = [kind for kind in reversed(settings.__mro__) if is_dataclass(kind)]
    return {f.name: f.metadata[RANGE] for kind in classes for f in fields(kind) if RANGE in f.metadata}


@cache
def _choices(settings: type) -> dict[str, tuple[object, ...]]:
    """Return the values that fields of type `Literal` or `Optional[Literal]` can have."""
    choices = {}
    for name, kind in get_type_hints(settings).items():
        kinds = (kind, *get_args(kind))
        if literals := [each for each in kinds if get_origin(each) is Literal]:
            choices[name] = get_args(literals[0]) + (None,) * (type(None) in kinds)
    return choices


def check_unused(
    part: str, config: "DataclassInstance", names: Sequence[str], where: str, cure: str, fault: str = "has no effect"
) -> None:
    """Check that settings without effect, or with another fault, have their default values.

    Args:
        part: name of the configuration in overrides, such as `training`.
        where: circumstances under which they have the fault.
        cure: change that removes the fault.
        fault: what is wrong with settings of other values.
    """
    settings = {setting.name: setting for setting in fields(config)}
    values, defaults = [], []
    for name in names:
        value, factory = getattr(config, name), settings[name].default_factory
        default = settings[name].default if factory is MISSING else factory()
        if value != default:
            values.append(f"{part}.{name}={value}")
            defaults.append(f"{part}.{name}={default}")
    if values:
        raise ConfigError(f"{', '.join(values)} {fault} {where}; {cure}, or leave {', '.join(defaults)}")


def divisors(n: int) -> list[int]:
    """Return the divisors of a positive number, ascending, for messages."""
    return [d for d in range(1, n + 1) if n % d == 0]


def check_path(key: str, path: str) -> None:
    """Check that a text is a possible path."""
    if path.startswith("~"):
        raise ConfigError(f"{key}={path!r} would be a folder called ~; write {os.path.expanduser(path)}")
    if not path.strip() or "\0" in path:
        raise ConfigError(f"{key}={path!r} is not a path; give one such as runs/mine")


def check_address(key: str, address: str) -> None:
    """Check that a text is an address of the form that `fsspec` expects, such as `s3://bucket/folder`."""
    if not ADDRESS.fullmatch(address):
        without_password = re.sub(r"//[^/]*@", "//...@", address)
        raise ConfigError(
            f"{key}={without_password!r} is not an address such as s3://bucket/folder, without `:` and `@`: port and "
            "credentials come from the environment of the store's client (for s3 AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL)"
        )


def duration_s(name: str, text: str) -> float:
    """Convert a duration in the format of Slurm's `--time` to seconds.

    Args:
        text: `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`, `days-hours:minutes` or
            `days-hours:minutes:seconds`.
    """
    days, has_days, clock = text.rpartition("-")
    numbers = clock.split(":")
    forms = {(False, 1): (60,), (False, 2): (60, 1), (False, 3): (3600, 60, 1)}
    forms |= {(True, 1): (3600,), (True, 2): (3600, 60), (True, 3): (3600, 60, 1)}
    units = forms.get((bool(has_days), len(numbers)))
    seconds = 0
    if units is not None and all(re.fullmatch("[0-9]{1,9}", n) for n in [*numbers, *([days] if has_days else [])]):
        seconds = 86400 * int(days or 0) + sum(int(n) * unit for n, unit in zip(numbers, units))
    if seconds <= 0:
        raise ConfigError(
            f"{name}={text!r} is not a duration; write it as for Slurm: minutes, hours:minutes:seconds, or "
            "days-hours:minutes:seconds, such as 03:55:00"
        )
    return float(seconds)
