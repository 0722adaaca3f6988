"""Conditions as data: the inputs of a network other than the noised latents, by name.

A `Condition` is a declaration, a row of `dit.condition_table`; a model lists its conditions (`ModelConfig.conditions`).
An `Entry` has the values of a condition for the samples of one pack, along one of four axes:

    axis      values      one value per                          examples
    sample    [S, ...]    sample                                 class, pooled text, frame rate, noise level
    text      [K, D]      text token, with the texts' layout     tokens of one text encoder, or of a second one
    latent    [T, C]      latent token                           low-resolution picture, mask, control picture
    token     [T, D]      latent token, stored per patch         features of a teacher

`Conditions`, the entries of a pack, moves, splits, drops, replaces, joins and checks all entries in the same way. No
other module depends on which conditions exist.

Shape suffixes: T packed tokens, S samples in the pack, K packed text tokens, C channels per token, D any width.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Optional

import torch
from torch import Tensor

from dit.errors import BatchError, ConfigError
from dit.layout import SequenceLayout
from dit.pack_copy import move
from dit.patchify import patchify_all

Axis = Literal["sample", "text", "latent", "token"]
PER_TOKEN = ("latent", "token")
Value = Tensor | float
"""A condition of one sample: a number, `[...]` per sample, `[k, D]` per text token, a picture `[C, T, H, W]`, or
`[D, t, h, w]` with one vector per patch."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The declaration of a condition: its shape, where samples store it, how it is dropped, and its null value.

    Attributes:
        description: noun for messages.
        shape: shape of a sample's value without the token axis: `()` is a number, `(D,)` the width of a vector or of a
            text token or of a patch, `(C,)` the channels of a picture of the latent's size, patchified like the latent.
            None allows every shape.
        dtype: dtype of the entry; None for that of the stored values.
        num_classes: the values are classes in `[0, num_classes)`; None for real numbers.
        null: replacement of a dropped value: a number, `no class` (the class index `num_classes`), `learned` (a
            parameter of the model, which reads `Entry.dropped_S`), or `empty text` (the embedding of "", see
            `Entry.null`).
        dropout: share of samples trained without the condition, for guidance; None: never dropped, also not by
            guidance.
        group: one draw per sample drops all conditions of a group, so the samples of the smallest share lose them all.
        requires: condition that must be present together with this one.
        default: value of samples that store none, also of every element of a vector; None: each sample must store one.
            It may be outside the limits. A text with a default is optional: samples that store none have no token.
        limits: valid values of a number.
        derive: computes the value of a sample that stores none from its latent `[C, T, H, W]`; None: not possible.
        stored_as: names in a sample, by default `name` (after `replace`, still the original name); the first existing
            one is used. A number is a key of the metadata; an array is a part (`NAME.npy` or `NAME.safetensors`) or,
            per sample, a list in the metadata.
        setting: setting of the model that requires the condition, for messages.
        hint: how to train without the condition, for messages.
        made_with: encoders that produce values of the model's width, for messages about narrower ones.
        of_picture: the tokens of the text are those of a picture, which `data.max_text_tokens` does not truncate.
    """

    name: str
    axis: Axis
    description: str
    shape: Optional[tuple[int, ...]] = ()
    dtype: Optional[torch.dtype] = torch.float32
    num_classes: Optional[int] = None
    null: float | Literal["learned", "no class", "empty text"] = "learned"
    dropout: Optional[float] = None
    group: str = "conditions"
    requires: Optional[str] = None
    default: Optional[float] = None
    limits: tuple[float, float] = (-math.inf, math.inf)
    derive: Optional[Callable[[Tensor], Tensor]] = None
    stored_as: tuple[str, ...] = ()
    setting: Optional[str] = None
    hint: str = ""
    made_with: str = ""
    of_picture: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stored_as", self.stored_as or (self.name,))
        if self.default is not None and (self.is_per_token or (self.axis == "sample" and self.shape is None)):
            raise ConfigError(
                f"the condition {self.name!r} has default={self.default:g}, axis={self.axis!r} and shape={self.shape}; "
                "only texts, and values per sample of a known shape, have a default, so use default=None"
            )

    @property
    def is_per_token(self) -> bool:
        return self.axis in PER_TOKEN

    @property
    def is_number(self) -> bool:
        """Whether the value of a sample is one number, not an array."""
        return self.axis == "sample" and self.shape == ()

    @property
    def stored_shape(self) -> str:
        """Shape of a sample's value, such as `[K, 1024]` for the tokens of a text."""
        sides = {"sample": "[{}]", "text": "[K, {}]", "latent": "[{}, T, H, W]", "token": "[{}, t, h, w]"}[self.axis]
        return sides.format("*" if self.shape is None else self.shape[0])

    @property
    def may_be_empty(self) -> bool:
        """Whether the condition is a text that a sample may lack."""
        return self.axis == "text" and self.default is not None

    @property
    def null_value(self) -> Optional[float]:
        """Number that replaces a dropped value; None if a parameter or an embedding does."""
        if self.null in ("learned", "empty text"):
            return None
        return self.num_classes if self.null == "no class" else float(self.null)

    @property
    def or_without(self) -> str:
        """End of a message: how to train without the condition, if a setting allows it."""
        return f", or train without{self.hint}: {self.setting}=null" if self.setting else ""

    def cure_of_width(self, width: int) -> str:
        """Return the end of a message about values whose width differs from the model's."""
        if self.made_with and self.shape is not None and width < self.shape[0]:
            return self.made_with
        return f"set {self.setting or 'its size'} to {width}"

    def out_of_range(self, value: float) -> Optional[str]:
        """Return an error for an invalid class or number, None for a valid one."""
        if self.num_classes is not None:
            is_class = 0 <= value < self.num_classes
            return None if is_class else f"{value:.0f}; the model has the classes 0 to {self.num_classes - 1}"
        low, high = self.limits
        return None if low <= value <= high else f"{value:g}, outside {low:g} to {high:g}"

    def wrong_shape(self, value: Tensor, latent_size: Sequence[int]) -> Optional[str]:
        """Return an error for the shape of one sample's value, None if it is valid.

        Args:
            latent_size: (T, H, W) of the sample's latent; in patches for the axis `token`.
        """
        picture = ("C", "T", "H", "W")
        sides = {"sample": ("width",), "text": ("tokens", "width"), "latent": picture, "token": picture}[self.axis]
        shape = list(value.shape)
        if len(shape) != len(sides) or 0 in (shape[1:] if self.may_be_empty else shape):
            return f"the {self.description} has shape {shape}, must be [{', '.join(sides)}]"
        if self.is_per_token and shape[1:] != list(latent_size):
            noun = "latent" if self.axis == "latent" else "grid of patches"
            size = f"{shape[1:]} (T x H x W), the {noun} {list(latent_size)}"
            return f"the {self.description} has the size {size}; store it at the size of the {noun}"
        width = shape[0] if self.is_per_token else shape[-1]
        if self.shape is not None and (width,) != self.shape:
            return f"the {self.description} has width {width}, the model takes width {self.shape[0]}"
        return None

    def invalid(self, value: Value, latent_size: Sequence[int]) -> Optional[str]:
        """Return an error for a value that a user gives for one sample (`wrong_shape`), None if it is valid."""
        if not self.is_number:
            return self.wrong_shape(torch.as_tensor(value), latent_size)
        if isinstance(value, Tensor) and value.numel() != 1:
            return f"{self.name} has shape {list(value.shape)}; give one number for each sample"
        fault = None if isinstance(value, Tensor) else self.out_of_range(value)
        return fault and f"{self.name} {fault}"

    def pack(self, values: Sequence[Value], layout: SequenceLayout, patch: tuple[int, int]) -> "Entry":
        """Concatenate the values of the samples of a pack."""
        if self.is_number:
            return Entry(self.axis, torch.tensor(values, dtype=self.dtype))
        tensors = [torch.as_tensor(value, dtype=self.dtype) for value in values]
        if self.axis == "sample":
            return Entry(self.axis, torch.stack(tensors))
        if self.axis == "text":
            texts = SequenceLayout.from_lengths([len(text) for text in tensors], may_be_empty=self.may_be_empty)
            return Entry(self.axis, tensors[0] if len(tensors) == 1 else torch.cat(tensors), texts)
        sides = patch if self.axis == "latent" else (1, 1)
        return Entry(self.axis, layout.insert_padding(patchify_all(tensors, *sides)))

    def absent(self, layout: SequenceLayout, patch: tuple[int, int]) -> Optional["Entry"]:
        """Return the entry of samples without the condition: its default or null; None if the null is not a number."""
        value = self.null_value if self.default is None else self.default
        if value is None or self.shape is None:
            return None
        if self.axis == "text":
            texts = SequenceLayout.from_lengths([0 if self.may_be_empty else 1] * layout.num_samples, may_be_empty=True)
            return Entry(self.axis, torch.full((texts.total_tokens, *self.shape), value, dtype=self.dtype), texts)
        if self.axis == "latent":
            width = self.shape[0] * patch[0] * patch[1] ** 2
            return Entry(self.axis, torch.full((layout.num_local_tokens, width), value, dtype=self.dtype))
        return Entry(self.axis, torch.full((layout.num_samples, *self.shape), value, dtype=self.dtype))


@dataclass(frozen=True)
class Entry:
    """The values of one condition for the samples of a pack.

    Attributes:
        values: `[S, ...]`, `[K, D]` or `[T, C]`.
        layout: layout of the text tokens; None for the other axes.
        dropped_S: True where the model's learned null replaces the value; None if it does so nowhere.
        null: embedding of the empty text, `[k, D]`, or `[D]` for a pooled text. Its tokens, repeated, replace those of
            a dropped text, because attention over a repeated token equals attention over the token. None for zeros, as
            in synthetic data, which have no text encoder.
    """

    axis: Axis
    values: Tensor
    layout: Optional[SequenceLayout] = None
    dropped_S: Optional[Tensor] = None
    null: Optional[Tensor] = None

    def select(self, indices_T: Tensor) -> "Entry":
        """Select tokens of the latent; entries along other axes are returned unchanged."""
        return replace(self, values=self.values[indices_T]) if self.axis in PER_TOKEN else self

    def drop(self, condition: Condition, dropped_S: Tensor, layout: SequenceLayout) -> "Entry":
        """Replace the values of some samples by the null; earlier replacements stay."""
        if condition.null == "learned":
            return replace(self, dropped_S=dropped_S if self.dropped_S is None else self.dropped_S | dropped_S)
        if self.axis == "sample":
            mask = dropped_S.view(-1, *[1] * (self.values.dim() - 1))
        else:
            mask = (layout if self.layout is None else self.layout).per_token(dropped_S)
        if self.null is None:
            return replace(self, values=self.values.masked_fill(mask, condition.null_value or 0))
        null = self.null.to(self.values.dtype)
        if self.axis != "sample":
            assert self.layout is not None
            null = null[self.layout.token_index_T % len(null)]
        return replace(self, values=torch.where(mask, null, self.values))

    def without_tokens(self) -> "Entry":
        assert self.layout is not None
        layout = SequenceLayout.from_lengths(
            [0] * self.layout.num_samples, device=self.layout.device, may_be_empty=True
        )
        return replace(self, values=self.values[:0], layout=layout)

    def followed_by(self, other: "Entry") -> "Entry":
        """Concatenate the entry of another pack of the same number of samples."""
        layout = dropped_S = None
        if self.layout is not None and other.layout is not None:
            layout = self.layout.followed_by(other.layout)
        if (present_S := other.dropped_S if self.dropped_S is None else self.dropped_S) is not None:
            nowhere_S = torch.zeros_like(present_S)
            dropped_S = torch.cat([nowhere_S if x.dropped_S is None else x.dropped_S for x in (self, other)])
        return Entry(self.axis, torch.cat([self.values, other.values]), layout, dropped_S, self.null)


class Conditions(Mapping[str, Entry]):
    """The conditions of one pack by name, without those that are None; every operation returns new ones."""

    def __init__(self, entries: Optional[Mapping[str, Optional[Entry]]] = None, **named: Optional[Entry]) -> None:
        entries = {**(entries or {}), **named}
        self._entries = {name: entry for name, entry in entries.items() if entry is not None}

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Conditions({', '.join(f'{name}={list(entry.values.shape)}' for name, entry in self.items())})"

    def __or__(self, others: Mapping[str, Entry]) -> "Conditions":
        """Add entries; they replace entries of the same name."""
        return Conditions({**self._entries, **others})

    def layout(self, name: str) -> Optional[SequenceLayout]:
        """Return the layout of a text; None if there is no such text."""
        return self._entries[name].layout if name in self._entries else None

    def without(self, *names: str) -> "Conditions":
        return Conditions({name: entry for name, entry in self.items() if name not in names})

    def with_nulls(self, nulls: Mapping[str, Tensor]) -> "Conditions":
        """Set the embeddings of the empty text, `[k, D]` by name, which replace dropped texts."""
        return self | {name: replace(self[name], null=null) for name, null in nulls.items() if name in self}

    def to(self, device: torch.device | str) -> "Conditions":
        """Copy every tensor to `device`; the host does not wait."""
        return move(self, torch.device(device))

    def select(self, indices_T: Tensor) -> "Conditions":
        """Select the local tokens of a context-parallel rank on the latent axis."""
        return Conditions({name: entry.select(indices_T) for name, entry in self.items()})

    def drop(
        self, required: Sequence[Condition], draw: Callable[[str], Tensor], layout: SequenceLayout
    ) -> "Conditions":
        """Drop conditions of some samples, for classifier-free guidance.

        There is one uniform draw per sample and group; each condition of the group is dropped if the draw is below its
        `dropout`. With shares p <= q of two conditions, the draw u decides:

            u < p: both are dropped        p <= u < q: only the second is dropped        q <= u: both are present

        The fraction p of the samples without any condition trains the unconditional prediction, which guidance
        subtracts. With two independent draws it would be only p * q. Different shares also train single conditions:
        guidance away from a negative text without a class needs a class dropout above that of the text.

        Optional texts are not dropped in training, because the number of tokens would depend on the draw.

        Args:
            draw: returns one number in [0, 1) per sample, `[S]`, for a purpose.

        Source: Ho and Salimans 2022, arXiv:2207.12598, Algorithm 1, for one condition.
        """
        draws: dict[str, Tensor] = {}
        changed = {}
        for condition in required:
            if condition.dropout is None or condition.may_be_empty or condition.name not in self:
                continue
            if condition.group not in draws:
                draws[condition.group] = draw(f"drop {condition.group}")
            dropped_S = draws[condition.group] < condition.dropout
            changed[condition.name] = self[condition.name].drop(condition, dropped_S, layout)
        return self | changed

    def unconditional(self, required: Sequence[Condition], layout: SequenceLayout) -> "Conditions":
        """Drop every droppable condition for all samples: the unconditional branch of guidance."""
        everywhere_S = torch.ones(layout.num_samples, dtype=torch.bool, device=layout.device)
        droppable = [c for c in required if c.dropout is not None and c.name in self]
        dropped = {c.name: self[c.name].drop(c, everywhere_S, layout) for c in droppable}
        return self | dropped | {c.name: self[c.name].without_tokens() for c in droppable if c.may_be_empty}

    def followed_by(self, others: "Conditions") -> "Conditions":
        if set(self) != set(others):
            raise BatchError(f"packs with the conditions {sorted(self)} and {sorted(others)} cannot be joined")
        return Conditions({name: entry.followed_by(others[name]) for name, entry in self.items()})

    def problems(
        self, required: Sequence[Condition], layout: SequenceLayout, keys: Sequence[str], patch_volume: int
    ) -> list[str]:
        """Check the entries against the pack and the conditions of the model, and return the errors.

        Args:
            patch_volume: latent positions in a patch.
        """
        errors = []
        for name, entry in self.items():
            need = layout.num_local_tokens if entry.axis in PER_TOKEN else layout.num_samples
            if entry.axis == "text":
                texts = entry.layout
                if texts is None:
                    errors.append(f"condition {name!r} is per text token and has no layout")
                    continue
                if texts.num_samples != layout.num_samples:
                    errors.append(f"condition {name!r} has {texts.num_samples} texts, needs {layout.num_samples}")
                need = texts.total_tokens
            if len(entry.values) != need:
                errors.append(f"condition {name!r} has {len(entry.values)} rows, needs {need}")
        for condition in required:
            if condition.name in self:
                errors.extend(_wrong_values(condition, self[condition.name], keys, patch_volume))
            elif condition.default is None:
                errors.append(f"the model takes the condition {condition.name!r}, the batch has {sorted(self)}")
        return errors


def _wrong_values(condition: Condition, entry: Entry, keys: Sequence[str], patch_volume: int) -> Iterator[str]:
    if entry.axis != condition.axis:
        yield f"condition {condition.name!r} is per {entry.axis}, the model takes it per {condition.axis}"
        return
    volume = patch_volume if condition.axis == "latent" else 1
    have, shape = tuple(entry.values.shape[1:]), condition.shape
    if shape is not None and have != tuple(volume * side for side in shape):
        need = [volume * side for side in shape]
        yield f"condition {condition.name!r} has values of shape {list(have)}, the model takes {need}"
    elif entry.null is not None and entry.layout is not None and len(entry.null) > 1:
        if (shortest := min(entry.layout.padded_lengths)) < len(entry.null):
            yield (
                f"condition {condition.name!r} has a text of {shortest} tokens, the empty text that replaces dropped "
                f"ones has {len(entry.null)}; prepare the data with an encoder that pads (NAME:padded)"
            )
    elif condition.num_classes is not None:
        for value, key in zip(entry.values.tolist(), keys):
            if fault := condition.out_of_range(value):
                yield f"sample {key!r} has {condition.name} {fault} (fix the data or raise {condition.setting})"


def pack_conditions(
    required: Sequence[Condition], values: Mapping[str, Sequence[Value]], layout: SequenceLayout, patch: tuple[int, int]
) -> Conditions:
    """Pack the conditions of samples, from their values by name; a condition without values gets no entry."""
    return Conditions({c.name: c.pack(values[c.name], layout, patch) for c in required if c.name in values})


def check_given(
    required: Sequence[Condition], values: Mapping[str, Sequence[Value]], count: int, latent_size: Sequence[int]
) -> None:
    """Check the conditions that a user gives for sampling.

    Args:
        latent_size: (T, H, W) of each sample.
    """
    by_name = {condition.name: condition for condition in required}
    for name, column in values.items():
        if name not in by_name:
            raise ConfigError(f"the model takes no condition {name!r}; it takes {sorted(by_name)}")
        condition = by_name[name]
        if len(column) != count:
            raise ConfigError(f"{len(column)} values of the condition {name!r} for {count} samples; give one for each")
        for value in column:
            if (fault := condition.invalid(value, latent_size)) is not None:
                raise ConfigError(fault)
    for condition in required:
        if condition.requires in values and condition.name not in values and condition.default is None:
            raise ConfigError(
                f"{condition.requires!r} is given without {condition.name!r}, which this model takes with it; give one "
                f"of {list(condition.shape or ())} features for each sample"
            )
