"""Conversion of Energon's loader state to plain dicts, lists and tensors, so that no pickled classes are stored."""

import dataclasses
from typing import Any

import numpy as np
import torch

from dit.errors import DataError

_PLAIN = (type(None), bool, int, float, str)
_TAG = "$"


def _classes() -> dict[str, type]:
    """Return the classes that may be rebuilt, by name."""
    from megatron.energon.flavors.base_dataset import FlexState
    from megatron.energon.flavors.webdataset.sample_loader import SliceState

    return {"FlexState": FlexState, "SliceState": SliceState}


def to_plain(value: object) -> Any:
    """Convert a state to plain containers."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.integer | np.floating | np.bool_):
        return value.item()
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, bytes):
        return {
            _TAG: "bytes",
            "value": torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0),
        }
    if type(value) is list:
        return [to_plain(v) for v in value]
    if type(value) is tuple:
        return tuple(map(to_plain, value))
    name = type(value).__name__
    if type(value) is dict or (isinstance(value, dict) and _classes().get(name) is type(value)):
        tag = "dict" if type(value) is dict else name
        return {_TAG: tag, "value": [[to_plain(k), to_plain(v)] for k, v in value.items()]}
    if dataclasses.is_dataclass(value) and _classes().get(name) is type(value):
        items = [[f.name, to_plain(getattr(value, f.name))] for f in dataclasses.fields(value)]
        return {_TAG: name, "value": items}
    raise DataError(f"the loader state contains a {type(value).__module__}.{name}, which this version cannot save")


def from_plain(value: object) -> Any:
    """Rebuild the value that `to_plain` converted."""
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [from_plain(v) for v in value]
    if type(value) is tuple:
        return tuple(map(from_plain, value))
    if type(value) is not dict or set(value) != {_TAG, "value"}:
        raise DataError(f"the loader state is damaged: a {type(value).__name__} where tagged data is expected")
    tag, content = value[_TAG], value["value"]
    if tag == "bytes":
        return bytes(content.to(torch.uint8).numpy())
    items = {from_plain(k): from_plain(v) for k, v in content}
    if tag == "dict":
        return items
    cls = _classes().get(tag)
    if cls is None:
        raise DataError(f"the loader state names the class {tag!r}, which is not on the list; it is not loaded")
    return cls(items) if issubclass(cls, dict) else cls(**items)
