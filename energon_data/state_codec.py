"""Conversion of Energon's loader state to plain dicts, lists and tensors, so that no pickled classes are stored."""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors.base_dataset import FlexState
from megatron.energon.flavors.webdataset.sample_loader import SliceState

from dit.errors import DataError

_PLAIN = (type(None), bool, int, float, str)
_TAG = "$"
_CLASSES = {"dict": dict, "FlexState": FlexState, "SliceState": SliceState}
"""Classes that may be rebuilt, by name."""


def to_plain(value: Any) -> Any:
    """Convert a state to plain containers."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.integer | np.floating | np.bool_):
        return value.item()
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": torch.from_numpy(np.frombuffer(value, np.uint8).copy())}
    if type(value) in (list, tuple):
        return type(value)(map(to_plain, value))
    cls = type(value)
    if _CLASSES.get(cls.__name__) is cls:
        items = value.items() if isinstance(value, dict) else [(f.name, getattr(value, f.name)) for f in fields(value)]
        return {_TAG: cls.__name__, "value": [[to_plain(k), to_plain(v)] for k, v in items]}
    raise DataError(f"the loader state contains a {cls.__module__}.{cls.__name__}, which this version cannot save")


def from_plain(value: Any) -> Any:
    """Rebuild the value that `to_plain` converted."""
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return type(value)(map(from_plain, value))
    if type(value) is not dict or set(value) != {_TAG, "value"}:
        raise DataError(f"the loader state is damaged: a {type(value).__name__} where tagged data is expected")
    tag, content = value[_TAG], value["value"]
    if tag == "bytes":
        return bytes(content.to(torch.uint8).numpy())
    if (cls := _CLASSES.get(tag)) is None:
        raise DataError(f"the loader state names the class {tag!r}, which is not on the list; it is not loaded")
    items = {from_plain(k): from_plain(v) for k, v in content}
    return cls(items) if issubclass(cls, dict) else cls(**items)
