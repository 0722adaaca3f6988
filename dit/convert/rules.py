"""Rules that convert parameters to and from another code base ("external" tensors).

A rule has the global name of a parameter, the names of external tensors, and a reversible rearrangement. Import and
export use the same rules, so a round trip is exact to the bit. A name without a rule, on either side, is an error.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from einops import EinopsError, rearrange
from torch import Tensor

from dit.errors import ConfigError, first_few

Shape = tuple[int, ...]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Form(ABC):
    """A reversible rearrangement between a parameter and external tensors."""

    @property
    def axis(self) -> Optional[int]:
        """The axis of a matrix that is rearranged: 0 for outputs, 1 for inputs; None for other changes."""
        return 0

    @abstractmethod
    def to_external(self, parameter: Tensor) -> Sequence[Tensor]:
        """Return the external tensors of a parameter."""

    def positions(self, size: int) -> list[Tensor]:
        """Return one tensor for each external tensor: the index in the parameter of each of its rows or columns."""
        indices = torch.arange(size)
        return [part.flatten() for part in self.to_external(indices[None] if self.axis else indices[:, None])]

    def from_external(self, tensors: Sequence[Tensor]) -> Tensor:
        """Invert `to_external` exactly."""
        assert self.axis is not None
        joined = torch.cat(list(tensors), self.axis)
        return joined.index_select(self.axis, torch.cat(self.positions(joined.shape[self.axis])).argsort())


@dataclass(frozen=True)
class Copies(Form):
    """`count` external copies of one parameter; copies that differ cannot be imported."""

    count: int

    def from_external(self, tensors: Sequence[Tensor]) -> Tensor:
        if any(not torch.equal(tensors[0], tensor) for tensor in tensors[1:]):
            raise ConfigError("copies of one tensor differ, but our model has only one")
        return tensors[0]

    def to_external(self, parameter: Tensor) -> Sequence[Tensor]:
        return (parameter,) * self.count


@dataclass(frozen=True)
class Axes(Form):
    """An einops pattern `external -> parameter`, a one-to-one rearrangement."""

    pattern: str
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def axis(self) -> Optional[int]:
        if self.pattern.startswith("d ("):
            return 1
        return 0 if self.pattern.endswith("...") else None

    def from_external(self, tensors: Sequence[Tensor]) -> Tensor:
        return rearrange(tensors[0], self.pattern, **self.sizes)

    def to_external(self, parameter: Tensor) -> Sequence[Tensor]:
        left, right = self.pattern.split("->")
        return (rearrange(parameter, f"{right} -> {left}", **self.sizes),)


@dataclass(frozen=True)
class ByHead(Form):
    """A fused projection: the parameter is ordered by head, then part; external tensors by part, then head.

    Attributes:
        heads: of each part.
        shares: features of a head in each part.
        turned: parts with rotary embeddings. Feature pairs that rotate together are (2 i, 2 i + 1) in external tensors,
            and (i, i + half of the head) in the parameter.
        fused: one external tensor has all parts; otherwise there is one for each part.
        dim: axis of the features: 0 for outputs, 1 for inputs.
        alternate: the features of the last two parts alternate in the parameter (gates and values of a SwiGLU).
        queries: heads of the first part in each of `heads` groups (grouped-query attention).
    """

    heads: int
    shares: tuple[int, ...]
    turned: tuple[int, ...] = ()
    fused: bool = False
    dim: int = 0
    alternate: bool = False
    queries: int = 1

    @property
    def axis(self) -> Optional[int]:
        return self.dim

    def to_external(self, parameter: Tensor) -> Sequence[Tensor]:
        by_head = list(parameter.unflatten(self.dim, (self.heads, -1)).split(list(self.shares), self.dim + 1))
        if self.alternate:
            pairs = torch.cat(by_head[-2:], self.dim + 1).unflatten(self.dim + 1, (-1, 2))
            by_head[-2:] = pairs.unbind(self.dim + 2)
        for i in self.turned:
            halves = by_head[i].unflatten(self.dim + 1, (self.queries if i == 0 else 1, 2, -1))
            by_head[i] = halves.transpose(self.dim + 2, self.dim + 3).flatten(self.dim + 1, self.dim + 3)
        parts = [x.flatten(self.dim, self.dim + 1) for x in by_head]
        return (torch.cat(parts, self.dim),) if self.fused else parts


SAME = Axes("... -> ...")
"""One external tensor, equal to the parameter."""
POINTWISE = Axes("d ... 1 1 -> d ...")
"""A linear layer that is an external 1 x 1 convolution."""
TURNED_HEAD = Axes("(half two) -> (two half)", {"two": 2})
"""A vector over the features of a head with rotary embeddings, such as the weight of its norm."""


@dataclass(frozen=True)
class SwappedHalves(Form):
    """The two halves along the first axis in the other order: (scale, shift) for (shift, scale)."""

    def to_external(self, parameter: Tensor) -> Sequence[Tensor]:
        return (parameter.roll(len(parameter) // 2, 0),)


@dataclass(frozen=True)
class Negated(Form):
    """A linear layer whose output the other code base negates."""

    @property
    def axis(self) -> None:
        return None

    def from_external(self, tensors: Sequence[Tensor]) -> Tensor:
        return -tensors[0]

    def to_external(self, parameter: Tensor) -> Sequence[Tensor]:
        return (-parameter,)


@dataclass(frozen=True)
class Rule:
    """A parameter and the external tensors with its numbers."""

    name: str
    external_names: tuple[str, ...]
    form: Form = SAME


def expanded(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Expand the alternatives in a table of names, such as `(q|k|v)`, into the external names of each name.

    Each of our names gets an equal share of the external names, in order:

        embed             x_embedder            embed -> x_embedder
        #.linear_fc(1|2)  #.ff.net.(0.proj|2)   #.linear_fc1 -> #.ff.net.0.proj,  #.linear_fc2 -> #.ff.net.2
        #.linear_qkv      #.attn.to_(q|k|v)     #.linear_qkv -> #.attn.to_q, #.attn.to_k, #.attn.to_v
    """
    table: dict[str, tuple[str, ...]] = {}
    for name, external in names.items():
        ours, theirs = alternatives(name), alternatives(external)
        share, rest = divmod(len(theirs), len(ours))
        assert not rest, f"{len(theirs)} names in {external} for {len(ours)} in {name}"
        table |= {one: tuple(theirs[i * share : (i + 1) * share]) for i, one in enumerate(ours)}
    return table


def alternatives(name: str) -> list[str]:
    """Return the names that a name with alternatives stands for."""
    start, parenthesis, rest = name.partition("(")
    options, _, end = rest.partition(")")
    if not parenthesis:
        return [name]
    return [start + option + tail for option in options.split("|") for tail in alternatives(end)]


def pattern_and_number(name: str) -> tuple[str, str]:
    """Return a name with `#` in place of the number of its block, and this number; an empty text if it has none."""
    match = re.search(r"\.(\d+)\.", name)
    return (name, "") if match is None else (f"{name[: match.start(1)]}#{name[match.end(1) :]}", match[1])


def layer_of(name: str) -> str:
    """Return the layer of a weight or bias; other names are returned unchanged."""
    return re.sub(r"\.(weight|bias)$", "", name)


def layer_rules(
    parameters: Iterable[str], names: Mapping[str, str], forms: Mapping[str, Form], *, num_joint: int | None = None
) -> list[Rule]:
    """Return the rules of parameters by a table of names.

    Args:
        names: the external names of each layer or other tensor by our name, see `expanded`; `#` is the number of a
            block, or of a copy.
        forms: the form of each layer or parameter that differs; a key with the number of a block precedes one with `#`.
        num_joint: number of blocks with two streams; those after them have names `single.#`, and numbers from 0.
    """
    external, form_of = expanded(names), {one: form for name, form in forms.items() for one in alternatives(name)}
    unnamed = [key for key in form_of if layer_of(pattern_and_number(key)[0]) not in external]
    assert not unnamed, f"forms of layers without a name: {', '.join(unnamed)}"
    rules = []
    for parameter in parameters:
        pattern, number = pattern_and_number(parameter)
        if num_joint is not None and pattern.startswith("layers.#.") and int(number) >= num_joint:
            pattern, number = "single" + pattern.removeprefix("layers"), str(int(number) - num_joint)
        layer = layer_of(pattern)
        if layer in external:
            ending = pattern.removeprefix(layer)
            keys = (parameter.removesuffix(ending), pattern, layer)
            form = next((form_of[key] for key in keys if key in form_of), SAME)
            numbers = range(form.count) if isinstance(form, Copies) else [number]
            theirs = (name.replace("#", str(i)) + ending for i in numbers for name in external[layer])
            rules.append(Rule(parameter, tuple(theirs), form))
    return rules


def renamed(name: str, parts: Mapping[str, str]) -> str:
    """Replace the parts of a name that differ."""
    for part, replacement in parts.items():
        name = name.replace(part, replacement)
    return name


@dataclass(frozen=True)
class RuleBook:
    """All rules between a model and its external counterpart.

    Attributes:
        rules: every parameter is in exactly one rule, or in `unmatched`.
        tables: external tensors that our model computes; compared if a file has them, never loaded.
        stored_tables: whether external files have the tables.
        unmatched: parameters that are imported as zeros and not exported, and the reason.
    """

    shapes: Mapping[str, Shape]
    rules: Sequence[Rule]
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    stored_tables: bool = False
    unmatched: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [*(rule.name for rule in self.rules), *self.unmatched]
        external_names = [name for rule in self.rules for name in rule.external_names] + list(self.tables)
        assert len(set(external_names)) == len(external_names), "an external tensor is in two rules"
        assert sorted(names) == sorted(self.shapes), sorted(set(names) ^ set(self.shapes))

    def export_notes(self) -> list[str]:
        """Return a sentence for each parameter that is not exported."""
        return [f"{name} is not exported: {why}" for name, why in self.unmatched.items()]

    def external_shapes(self) -> dict[str, Shape]:
        """Return name and shape of every external tensor except the tables."""
        shapes: dict[str, Shape] = {}
        for rule in self.rules:
            parts = rule.form.to_external(torch.empty(self.shapes[rule.name], device="meta"))
            shapes |= {name: tuple(part.shape) for name, part in zip(rule.external_names, parts, strict=True)}
        return shapes

    @torch.no_grad()
    def from_external(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert external tensors to parameters, float32, by global name."""
        shapes = {name: tuple(x.shape) for name, x in tensors.items() if name not in self.tables}
        check_shapes("the weights do not fit the model", self.external_shapes(), shapes)
        for name, tensor in tensors.items():
            check_numbers(name, tensor)
        for name, table in self.tables.items():
            if name in tensors:
                check_table(name, tensors[name], table)
        parameters = {name: torch.zeros(self.shapes[name]) for name in self.unmatched}
        for rule in self.rules:
            try:
                parameter = rule.form.from_external([tensors[name] for name in rule.external_names])
            except (ConfigError, EinopsError) as error:
                raise ConfigError(f"{rule.name} cannot be made of {', '.join(rule.external_names)}: {error}") from error
            parameters[rule.name] = parameter.float().contiguous()
        return parameters

    @torch.no_grad()
    def to_external(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert parameters to external tensors by name."""
        shapes = {name: tuple(x.shape) for name, x in parameters.items()}
        check_shapes("the parameters do not fit the model", self.shapes, shapes)
        tensors: dict[str, Tensor] = dict(self.tables) if self.stored_tables else {}
        for rule in self.rules:
            parts = rule.form.to_external(parameters[rule.name])
            for name, part in zip(rule.external_names, parts):
                # Cloned, because the writer drops a tensor that shares its storage with another.
                tensors[name] = part.clone(memory_format=torch.contiguous_format)
        return tensors


def check_shapes(fault: str, expected: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> None:
    """Compare two tables of shapes."""
    missing = [f"{name} {list(expected[name])}" for name in expected if name not in shapes]
    unknown = [f"{name} {list(shapes[name])}" for name in shapes if name not in expected]
    differ = [
        f"{name} is {list(shapes[name])}, needs {list(expected[name])}"
        for name in expected
        if name in shapes and shapes[name] != expected[name]
    ]
    parts = [("missing", missing), ("unknown", unknown), ("of another shape", differ)]
    if missing or unknown or differ:
        faults = "; ".join(f"{len(names)} {kind}: {first_few(names)}" for kind, names in parts if names)
        raise ConfigError(
            f"{fault} ({len(expected)} tensors): {faults}; check that file, format and model belong together"
        )


def check_numbers(name: str, tensor: Tensor) -> None:
    """Raise `ConfigError` for a tensor that is quantised or not finite."""
    if tensor.dtype not in FLOATS:
        raise ConfigError(
            f"{name} has dtype {tensor.dtype}; quantised weights are not read, only {', '.join(map(str, FLOATS))}"
        )
    if not tensor.isfinite().all():
        raise ConfigError(f"{name} has {int((~tensor.isfinite()).sum())} numbers that are not finite")


def check_table(name: str, stored: Tensor, computed: Tensor) -> None:
    """Raise `ConfigError` for a stored table that differs from ours by more than rounding."""
    if stored.shape != computed.shape:
        raise ConfigError(
            f"{name} is {list(stored.shape)}, needs {list(computed.shape)}; the files are for another latent size"
        )
    # Tables are computed in float64 everywhere and rounded to the file's precision.
    limit = max(1e-6, torch.finfo(stored.dtype).eps)
    difference = float((stored.double() - computed.double()).abs().max())
    if not difference <= limit:
        raise ConfigError(
            f"{name} is not the fixed table that our model computes: it differs by up to {difference:.3g}, and "
            f"rounding explains {limit:.1g}; a model with other positions cannot be imported"
        )


ONLY_SUPPORTED = "only a model that meets this requirement can be converted"
"""Cure for settings that the other code base does not support; an import also checks the export of its model."""


def require(fault: str, settings: Mapping[str, Any], supported: Mapping[str, Any], cure: str) -> None:
    """Check that settings have the only values that the other code base supports."""
    wrong = [
        f"{name}={settings.get(name)!r} (only {value!r})"
        for name, value in supported.items()
        if settings.get(name) != value
    ]
    if wrong:
        raise ConfigError(f"{fault}: {', '.join(wrong)}; {cure}")
