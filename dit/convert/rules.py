"""Our parameters and another code base's, side by side: rules that are read in both directions.

A rule is data: one of our global names, their names, and a reversible change of form. Import and export follow the same
rules, so a round trip gives every bit back, and a name that no rule knows, on either side, is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional, Protocol

import torch
from einops import EinopsError, rearrange
from torch import Tensor

from dit.errors import ConfigError

Shape = tuple[int, ...]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUM_SHOWN = 5  # names in a message before it says how many more there are


class Form(Protocol):
    """How the same numbers are laid out on the two sides."""

    @property
    def axis(self) -> Optional[int]:
        """The axis of a matrix whose entries change places: 0 for outputs, 1 for inputs; None for other changes."""

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        """Join their tensors into ours."""

    def to_theirs(self, ours: Tensor) -> Sequence[Tensor]:
        """Undo `to_ours`, to the bit."""


@dataclass(frozen=True)
class Same:
    """One tensor, the same on both sides."""

    axis: ClassVar[Optional[int]] = 0

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return theirs[0]

    def to_theirs(self, ours: Tensor) -> Sequence[Tensor]:
        return (ours,)


@dataclass(frozen=True)
class Copies:
    """We hold once what they hold `count` times; copies that differ cannot be imported."""

    axis: ClassVar[Optional[int]] = 0
    count: int

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        if any(not torch.equal(theirs[0], other) for other in theirs[1:]):
            raise ConfigError("copies of one tensor differ, and our model holds it once")
        return theirs[0]

    def to_theirs(self, ours: Tensor) -> Sequence[Tensor]:
        return (ours,) * self.count


@dataclass(frozen=True)
class Axes:
    """An einops pattern from theirs to ours.

    Attributes:
        pattern: `theirs -> ours`, a one-to-one rearrangement.
        sizes: of the axes that cannot be read off both sides.
    """

    pattern: str
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def axis(self) -> Optional[int]:
        return 0 if self.pattern.endswith("...") else None

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return rearrange(theirs[0], self.pattern, **self.sizes)

    def to_theirs(self, ours: Tensor) -> Sequence[Tensor]:
        left, right = self.pattern.split("->")
        return (rearrange(ours, f"{right} -> {left}", **self.sizes),)


@dataclass(frozen=True)
class Pointwise:
    """A linear layer on our side, a convolution of 1 x 1 on theirs; also for the two matrices of an adapter."""

    axis: ClassVar[Optional[int]] = 0

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        return theirs[0].flatten(1)

    def to_theirs(self, ours: Tensor) -> Sequence[Tensor]:
        return (ours[:, :, None, None],)


@dataclass(frozen=True)
class ByHead:
    """A fused projection: ours has, for each head in turn, its share of every part; theirs has part after part.

    Attributes:
        heads: of each part.
        shares: features of a head in each part.
        turned: parts whose pairs of features turn with the position: neighbours (2 i, 2 i + 1) on their side, (i, i +
            half of the head) on ours.
        fused: theirs is one tensor with all parts, not one for each.
        dim: axis of the features: 0 for outputs, 1 for inputs.
    """

    heads: int
    shares: tuple[int, ...]
    turned: tuple[int, ...] = ()
    fused: bool = False
    dim: int = 0

    @property
    def axis(self) -> Optional[int]:
        return self.dim

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        sizes = [self.heads * share for share in self.shares]
        parts = theirs[0].split(sizes, self.dim) if self.fused else theirs
        by_head = [x.unflatten(self.dim, (self.heads, -1)) for x in parts]
        for i in self.turned:
            by_head[i] = _swap_pairs(by_head[i], self.dim + 1, (-1, 2))
        return torch.cat(by_head, self.dim + 1).flatten(self.dim, self.dim + 1)

    def to_theirs(self, ours: Tensor) -> Sequence[Tensor]:
        by_head = list(ours.unflatten(self.dim, (self.heads, -1)).split(list(self.shares), self.dim + 1))
        for i in self.turned:
            by_head[i] = _swap_pairs(by_head[i], self.dim + 1, (2, -1))
        parts = [x.flatten(self.dim, self.dim + 1) for x in by_head]
        return (torch.cat(parts, self.dim),) if self.fused else parts


def _swap_pairs(x: Tensor, dim: int, sizes: tuple[int, int]) -> Tensor:
    return x.unflatten(dim, sizes).transpose(dim, dim + 1).flatten(dim, dim + 1)


TURNED_HEAD = Axes("(half two) -> (two half)", {"two": 2})
"""A vector over the features of a head that turn with the position, such as the weight of its norm."""


@dataclass(frozen=True)
class Chunks:
    """Equal chunks along the first axis in another order, such as (scale, shift) for (shift, scale).

    Attributes:
        order: which of their chunks each of ours is.
    """

    axis: ClassVar[Optional[int]] = 0
    order: tuple[int, ...]

    def to_ours(self, theirs: Sequence[Tensor]) -> Tensor:
        chunks = theirs[0].chunk(len(self.order))
        return torch.cat([chunks[i] for i in self.order])

    def to_theirs(self, ours: Tensor) -> Sequence[Tensor]:
        chunks = ours.chunk(len(self.order))
        return (torch.cat([chunks[self.order.index(i)] for i in range(len(self.order))]),)


@dataclass(frozen=True)
class Rule:
    """One of our parameters and the tensors of theirs that hold its numbers."""

    ours: str
    theirs: tuple[str, ...]
    form: Form = field(default_factory=Same)


def with_bias(ours: str, *theirs: str, form: Form | None = None) -> list[Rule]:
    """Return the rules of the weight and the bias of a linear layer, both of one form."""
    form = Same() if form is None else form
    return [Rule(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), form) for kind in ("weight", "bias")]


@dataclass(frozen=True)
class RuleBook:
    """All rules between one of our models and another code base's.

    Attributes:
        shapes: of our parameters, by global name.
        rules: every one of `shapes` is in exactly one rule, or in `only_ours`.
        tables: tensors that they store and we compute: compared where a file holds them, never loaded.
        stored_tables: whether their files hold the tables.
        only_ours: parameters that their model has no counterpart of, and why; imported as zeros, not exported.
    """

    shapes: Mapping[str, Shape]
    rules: Sequence[Rule]
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    stored_tables: bool = False
    only_ours: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ours = [*(rule.ours for rule in self.rules), *self.only_ours]
        theirs = [name for rule in self.rules for name in rule.theirs] + list(self.tables)
        assert len(set(theirs)) == len(theirs), "a tensor of theirs is in two rules"
        assert sorted(ours) == sorted(self.shapes), sorted(set(ours) ^ set(self.shapes))

    def left_behind(self) -> list[str]:
        """Say what an export leaves behind."""
        return [f"{name} is not exported: {why}" for name, why in self.only_ours.items()]

    def their_shapes(self) -> dict[str, Shape]:
        """Return name and shape of every tensor that their model has, tables left out."""
        found: dict[str, Shape] = {}
        for rule in self.rules:
            parts = rule.form.to_theirs(torch.empty(self.shapes[rule.ours], device="meta"))
            found |= {name: tuple(part.shape) for name, part in zip(rule.theirs, parts, strict=True)}
        return found

    @torch.no_grad()
    def to_ours(self, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return our parameters, float32, by global name.

        Raises:
            ConfigError: a tensor is missing, unknown, of another shape or kind, or not finite; or a table is not ours.
        """
        expected = self.their_shapes()
        found = {name: tuple(x.shape) for name, x in theirs.items() if name not in self.tables}
        complain("the weights do not fit the model", expected, found)
        for name, tensor in theirs.items():
            check_numbers(name, tensor)
        for name, table in self.tables.items():
            if name in theirs:
                _check_table(name, theirs[name], table)
        ours = {name: torch.zeros(self.shapes[name]) for name in self.only_ours}
        for rule in self.rules:
            try:
                tensor = rule.form.to_ours([theirs[name] for name in rule.theirs])
            except (ConfigError, EinopsError) as error:
                raise ConfigError(f"{rule.ours} cannot be made of {', '.join(rule.theirs)}: {error}") from error
            ours[rule.ours] = tensor.float().contiguous()
        return ours

    @torch.no_grad()
    def to_theirs(self, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return their tensors by name.

        Raises:
            ConfigError: a parameter is missing, unknown or of another shape.
        """
        shapes = {name: tuple(shape) for name, shape in self.shapes.items()}
        complain(
            "the parameters do not fit the model they claim to be", shapes, {n: tuple(x.shape) for n, x in ours.items()}
        )
        theirs: dict[str, Tensor] = dict(self.tables) if self.stored_tables else {}
        for rule in self.rules:
            parts = rule.form.to_theirs(ours[rule.ours])
            # A file may hold no two names for one storage.
            theirs |= {
                name: part.clone(memory_format=torch.contiguous_format) for name, part in zip(rule.theirs, parts)
            }
        return theirs


def complain(what: str, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    """Compare two tables of shapes.

    Raises:
        ConfigError: naming what is missing, what is unknown, and what has another shape.
    """
    missing = [f"{name} {list(expected[name])}" for name in expected if name not in found]
    unknown = [f"{name} {list(found[name])}" for name in found if name not in expected]
    differ = [
        f"{name} is {list(found[name])}, needs {list(expected[name])}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    parts = [("missing", missing), ("unknown", unknown), ("of another shape", differ)]
    if missing or unknown or differ:
        faults = "; ".join(f"{len(names)} {kind}: {some_of(names)}" for kind, names in parts if names)
        raise ConfigError(
            f"{what} ({len(expected)} tensors): {faults}; check that file, format and model belong together"
        )


def some_of(names: Sequence[str]) -> str:
    """Return the first names of a list and the number of the others."""
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more


def check_numbers(name: str, tensor: Tensor) -> None:
    """Raise `ConfigError` for a tensor that is quantised or not finite."""
    if tensor.dtype not in FLOATS:
        raise ConfigError(
            f"{name} is of {tensor.dtype}; quantised weights are not read, only {', '.join(map(str, FLOATS))}"
        )
    if not tensor.isfinite().all():
        raise ConfigError(f"{name} holds {int((~tensor.isfinite()).sum())} numbers that are not finite")


def _check_table(name: str, theirs: Tensor, ours: Tensor) -> None:
    if theirs.shape != ours.shape:
        raise ConfigError(f"{name} is {list(theirs.shape)}, needs {list(ours.shape)}; the latent size is another one")
    # Tables are computed in float64 everywhere and rounded to the file's precision.
    limit = max(1e-6, torch.finfo(theirs.dtype).eps)
    difference = float((theirs.double() - ours.double()).abs().max())
    if not difference <= limit:
        raise ConfigError(
            f"{name} is not the fixed table that our model computes: it differs by up to {difference:.3g}, {limit:.1g} "
            "would be rounding; a model with positions of its own cannot be imported"
        )


TRAIN_THAT_WAY = "only a model trained that way can be exported"
"""Cure for settings that the other side cannot express."""


def require(what: str, settings: Mapping[str, Any], wanted: Mapping[str, Any], cure: str) -> None:
    """Check that settings hold the only values that the other side can express.

    Raises:
        ConfigError: naming each one that does not.
    """
    wrong = [
        f"{name}={settings.get(name)!r} (only {value!r})"
        for name, value in wanted.items()
        if settings.get(name) != value
    ]
    if wrong:
        raise ConfigError(f"{what}: {', '.join(wrong)}; {cure}")
