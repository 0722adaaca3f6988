"""The language of `launch.nemo_keys`: rules that turn keys of a NeMo document into settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dit.errors import ConfigError

Settings = Mapping[str, object]
"""Values of our settings by their dotted path."""


@dataclass(frozen=True)
class Rule:
    """Keys that are read together, and the settings that they become.

    Attributes:
        settings: called with those that the document has, by the last part of their names and in its order.
        note: how we deviate; where there is no setting, why.
        required: the document must have all of the keys.
    """

    keys: tuple[str, ...]
    settings: Callable[..., Settings]
    note: str = ""
    required: bool = False

    @property
    def has_no_effect(self) -> bool:
        """Whether the keys may have any value, also none yet."""
        return self.settings is nothing


def nothing(**_: object) -> Settings:
    """Return no settings, whatever the keys are."""
    return {}


def maps(
    key: str,
    setting: str,
    read: Callable[[Any], object] = lambda value: value,
    *,
    default: object = None,
    note: str = "",
    required: bool = False,
) -> Rule:
    """Return the rule of a key that is one setting.

    Args:
        read: NeMo's value as ours.
        default: NeMo's value where the document has none; None leaves our default.
    """

    def settings(**values: object) -> Settings:
        value = next(iter(values.values()), default)
        return {} if value is None else {setting: read(value)}

    return Rule((key,), settings, note, required)


def only(key: str, *allowed: object, why: str) -> Rule:
    """Return the rule of a key that is refused unless it is absent or has one of these values."""

    def settings(**values: object) -> Settings:
        for value in values.values():
            if value not in allowed:
                raise ConfigError(f"{why}; remove the key" + (f" or set it to {allowed[0]}" if allowed else ""))
        return {}

    return Rule((key,), settings, why)


def unused(keys: str, why: str) -> list[Rule]:
    """Return the rules of keys, separated by spaces, that may have any value and change nothing here."""
    return [Rule((key,), nothing, why) for key in keys.split()]


def one_of(choices: Mapping[str, str]) -> Callable[[object], str]:
    """Return a reader of NeMo's names."""

    def read(value: object) -> str:
        if str(value) not in choices:
            raise ConfigError(f"{value} is not offered here; use one of {', '.join(choices)}")
        return choices[str(value)]

    return read


def switch(value: object) -> bool:
    """Return a value that must be true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{value!r} is neither true nor false")
    return value
