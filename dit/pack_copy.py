"""Copy of a pack to a device: all its tensors and integer tables in one buffer, by one asynchronous copy.

    host     latents | positions | ids | texts | cu_seqlens | segment ids | ...     page-locked bytes
    device   the same bytes; each tensor is a part of them

Layouts compute a table when a layer first reads it. On the device, such a table costs a copy of its own.
`compute_tables` therefore computes on the host, before the copy of a pack, the tables that the previous pack needed.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from dit import layout as layouts
from dit.layout import ITSELF, TABLES, SequenceLayout

ALIGNMENT = 128
"""Each tensor starts at a multiple of this many bytes, because kernels may load several elements at once."""

_LEAVES = (int, float, str, type(None))
Value = TypeVar("Value")


def compute_tables(new: dict[Hashable, SequenceLayout], previous: Mapping[Hashable, SequenceLayout]) -> None:
    """Compute for the layouts of a pack the tables that layouts with the same names of an earlier pack have.

    Args:
        new: layouts of the pack; those among their tables are added.
    """
    pending, names = list(previous.items()), {id(layout): name for name, layout in previous.items()}

    def argument(earlier: object) -> object:
        return new.get(names.get(id(earlier))) if isinstance(earlier, SequenceLayout) else earlier

    for name, earlier in pending:
        if name not in new:
            continue
        for table in TABLES & vars(earlier).keys():
            getattr(new[name], table)
        for (key, *_), (others, value) in list(earlier.tables.items()):
            make: Any = key
            arguments = [new[name] if other == ITSELF else argument(other) for other in others]
            if any(x is None for x in arguments):
                continue
            result: object = new[name].table(make, *arguments)
            if isinstance(result, SequenceLayout) and isinstance(value, SequenceLayout):
                path = (make, name, *(names.get(id(other), other) for other in others))
                new[path], names[id(value)] = result, path
                pending.append((path, value))


def layouts_of(batch: Any) -> dict[Hashable, SequenceLayout]:
    """Return the layouts of a pack: of the latents, local latents as a separate pack, noise levels, and texts."""
    levels = batch.layout.levels
    by_name = {
        "latents": batch.layout,
        "local latents": batch.layout.local,
        "levels": None if levels is None else levels.layout,
    }
    by_name |= {f"text {name}": entry.layout for name, entry in batch.conditions.items()}
    return {name: part for name, part in by_name.items() if part is not None}


def all_layouts(batch: Any) -> dict[Hashable, SequenceLayout]:
    """Return the layouts of a pack, and those among their tables."""
    layouts_by_name = layouts_of(batch)
    compute_tables(layouts_by_name, dict(layouts_by_name))
    return layouts_by_name


def move(value: Value, device: torch.device) -> Value:
    """Copy all tensors in layouts, dataclasses, mappings and tuples to a device; layouts keep their tables."""
    sources: list[Tensor] = []
    _Mapping(lambda x: sources.append(x) or x, device)(value)  # type: ignore[func-returns-value]
    moved = iter(copy_together(sources, device))
    result: Value = _Mapping(lambda _: next(moved), device)(value)
    return result


def copy_together(sources: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to a device; the host does not wait.

    Tensors from the host share one buffer on the device. It is freed when none of them exists any more.
    """
    if device.type in layouts.UNPINNED:
        return [x.to(device) for x in sources]
    copies = iter(_copy_from_host([x for x in sources if x.device.type == "cpu"], device))
    return [next(copies) if x.device.type == "cpu" else x.to(device) for x in sources]


def _copy_from_host(sources: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    starts = list(accumulate((-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in sources), initial=0))
    buffer = page_locked(starts[-1])
    parts = [buffer[start : start + x.nbytes].view(x.dtype).view(x.shape) for x, start in zip(sources, starts)]
    for part, x in zip(parts, sources):
        part.copy_(x)
    storage = buffer.to(device, non_blocking=True).untyped_storage()
    # Not views of one tensor: to autograd, a change of one in place would be a change of all.
    return [
        torch.empty(0, dtype=x.dtype, device=device).set_(storage, x.storage_offset(), x.shape, x.stride())
        for x in parts
    ]


def page_locked(nbytes: int) -> Tensor:
    """Return uninitialised host memory from which a GPU copies while the host continues, uint8."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class _Mapping:
    """Applies a function to all tensors of a value; a layout that occurs twice remains one object."""

    def __init__(self, function: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self._function, self._device = function, device
        self._layouts: dict[int, SequenceLayout] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, _LEAVES):  # most values: lengths and sizes of samples
            return value
        if isinstance(value, Tensor):
            return self._function(value)
        if isinstance(value, SequenceLayout):
            return self._layouts[id(value)] if id(value) in self._layouts else self._layout(value)
        if isinstance(value, tuple | list):
            return type(value)(map(self, value))
        if isinstance(value, Mapping):
            return type(value)({key: self(x) for key, x in value.items()})  # type: ignore[call-arg]
        return self._fields(value) if is_dataclass(value) else value

    def _fields(self, value: Any, **changes: Any) -> Any:
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        parts = {name: part for name, part in parts.items() if not isinstance(part, torch.device)}
        return replace(value, **{name: self(part) for name, part in parts.items()}, **changes)

    def _layout(self, layout: SequenceLayout) -> SequenceLayout:
        moved: SequenceLayout = self._fields(layout, device=self._device)
        self._layouts[id(layout)] = moved
        computed = vars(layout)
        vars(moved).update({name: self(computed[name]) for name in sorted(TABLES & computed.keys())})
        if layout.tables:
            moved.tables.update({key: self(entry) for key, entry in layout.tables.items()})
        return moved
