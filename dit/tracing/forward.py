"""FLOPs of a backbone's forward pass, counted without values; a training process can call this.

The cost of a pack is the sum of its samples' costs, so samples are traced, one for each shape. Most shapes need no
trace: the cost of token mixers is a linear form of a few products of the shape (`features`), such as the number of
token pairs that attend inside a frame. The form is solved in exact fractions from the traced shapes. It is used for a
shape only if

* the shape's features are a combination of the traced ones, and
* it predicted at least two later traced shapes exactly, since the last shape that extended it.

If a backbone's cost is not such a form, these checks fail, and each of its shapes is traced.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Optional

import torch
import torch.distributed as dist

from dit.errors import ConfigError
from dit.models.base import ModelConfig, Stage
from dit.models.expert_options import ExpertOptions
from dit.parallel.build import build_on_one_rank
from dit.patchify import Grid
from dit.tracing.counter import StepCounter
from dit.tracing.packs import PackShape, batch_of
from dit.tracing.routing import experts_evenly_full
from dit.tracing.world import LocalProvider, fake_world

CONFIRMATIONS = 2
"""Number of additional shapes that a form must predict before it is used."""


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of a forward pass, two per multiply-add, and those of the layers, which recompute may repeat."""

    total: int
    layers: int

    def __sub__(self, other: "ForwardFlops") -> "ForwardFlops":
        return ForwardFlops(self.total - other.total, self.layers - other.layers)


class LinearForm:
    """An exact linear function of integers, fitted to examples: a matrix of fractions in echelon form."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Fraction]] = {}  # by the column of their leading one
        self._confirmed = 0
        self.holds = True

    def learn(self, features: Sequence[int], values: Sequence[int]) -> None:
        """Add an example; if it contradicts earlier ones, the form is no longer used."""
        residual = self._reduced(features, values)
        lead = next((i for i in range(len(features)) if residual[i]), None)
        if lead is not None:
            self._rows[lead] = [number / residual[lead] for number in residual]
            self._confirmed = 0
        elif any(residual):
            self.holds = False
        else:
            self._confirmed += 1

    def answer(self, features: Sequence[int], count: int) -> Optional[list[int]]:
        """Return the `count` values for some features; None if the examples do not determine them."""
        if not self.holds or self._confirmed < CONFIRMATIONS:
            return None
        residual = self._reduced(features, [0] * count)
        values = [-number for number in residual[len(features) :]]
        if any(residual[: len(features)]) or any(value.denominator > 1 for value in values):
            return None
        return [int(value) for value in values]

    def _reduced(self, features: Sequence[int], values: Sequence[int]) -> list[Fraction]:
        """Return the residual of an example after elimination by earlier examples."""
        residual = [Fraction(number) for number in (*features, *values)]
        for lead, row in sorted(self._rows.items()):
            factor = residual[lead]
            if factor:
                residual = [number - factor * entry for number, entry in zip(residual, row, strict=True)]
        return residual


def features(model: ModelConfig, grid: Grid, text: int) -> list[int]:
    """Return the features of a sample; the cost of its matrix products and attention is linear in them."""
    t, h, w = grid
    n = t * h * w
    numbers = [1, n, text, n * n, n * h * w, n * t, n * text, text * text]
    # Attention of single tokens, also within frames and columns, has no products (`dit.kernels.attention`).
    numbers += [int(n == 1), int(n == text == 1), n * (h * w == 1), n * (t == 1)]
    if (multiple := model.sample_multiple) > 1:
        n, text = (-(-count // multiple) * multiple for count in (n, text))
        numbers += [n, text, n * n, n * text, text * text]
    if (middle := model.middle_tokens(n)) < n:
        numbers += [middle, middle * middle, middle * text, int(middle == 1)]
    if isinstance(model, ExpertOptions) and model.num_experts is not None:
        numbers += [model.routed_pairs((tokens,)) for tokens in {n, model.middle_tokens(n)}]  # rounded up per sample
    return numbers


class ForwardCost:
    """Counts the operations of a model's forward passes, independently of the layout."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self._cache: dict[tuple[Grid, int], ForwardFlops] = {}
        self._forms: dict[Optional[Grid], LinearForm] = {}
        self._padding: Optional[ForwardFlops] = None
        self._network: Optional[_Shortened] = None

    def of_sample(self, grid: Grid, text: int = 1) -> ForwardFlops:
        """Count the operations of a sample; the null text has one token."""
        flops = self._cache.get((grid, text))
        if flops is None:
            # A network on grids may round their sides, so each grid has a separate form in the text length.
            form = self._forms.setdefault(grid if not self.model.supports.mixed_shapes else None, LinearForm())
            numbers = features(self.model, grid, text)
            answer = form.answer(numbers, 2)
            flops = self.traced(PackShape((grid,), (text,))) if answer is None else ForwardFlops(*answer)
            if answer is None:
                form.learn(numbers, (flops.total, flops.layers))
            self._cache[grid, text] = flops
        return flops

    def of_padding(self, grid: Grid) -> ForwardFlops:
        """Count the operations of one row of padding."""
        if self._padding is None:
            pack = PackShape((grid,), (1,))
            self._padding = self.traced(replace(pack, total_tokens=math.prod(grid) + 1)) - self.traced(pack)
        return self._padding

    def traced(self, pack: PackShape) -> ForwardFlops:
        """Count the operations of a pack by running the program without values."""
        world = contextlib.nullcontext() if dist.is_initialized() else fake_world(0, 1)
        with world, experts_evenly_full(), torch.no_grad():
            if self._network is None:
                self._network = _Shortened(self.model)
            return self._network.count(pack)


_COSTS: dict[tuple[type, str], ForwardCost] = {}


def forward_cost(model: ModelConfig) -> ForwardCost:
    """Return the counts of a model; runs of equal models in one process share them, because a trace takes 0.1 s."""
    return _COSTS.setdefault((type(model), repr(model)), ForwardCost(copy.deepcopy(model)))


class _Shortened:
    """A backbone on the meta device with the shortest run of layers that contains all kinds.

    If its units are not its layers, it is the full backbone.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self._counter = StepCounter()
        all_kinds = [model.layer_kind(i) for i in range(model.megatron_sizes().num_layers)]
        lengths = range(len(set(all_kinds)), len(all_kinds))
        runs = (range(i, i + length) for length in lengths for i in range(len(all_kinds) - length + 1))
        part = next(
            (run for run in runs if set(all_kinds[run.start : run.stop]) == set(all_kinds)),
            range(len(all_kinds)),
        )
        with torch.device("meta"):
            self._network = build_on_one_rank(model, Stage(part), LocalProvider)
            if len(list(self._network.units())) != len(part):
                part = range(len(all_kinds))
                self._network = build_on_one_rank(model, Stage(part), LocalProvider)
        self._part, self._is_shortened = part, len(part) < len(all_kinds)
        layers = list(self._network.units())
        # Number of layers of this kind in the model; the first layer of a kind represents all.
        kinds = all_kinds[part.start : part.stop] if len(layers) == len(part) else list(range(len(layers)))
        self._times = [
            0 if kind in kinds[:i] else all_kinds.count(kind) if len(layers) == len(part) else 1
            for i, kind in enumerate(kinds)
        ]
        self._flops = [0] * len(layers)
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._note, i, -1))
            layer.register_forward_hook(functools.partial(self._note, i, 1))

    def _note(self, i: int, sign: int, *_: Any) -> None:
        self._flops[i] += sign * self._counter.trace.flops

    def count(self, pack: PackShape) -> ForwardFlops:
        """Run a forward pass, and multiply the cost of each kind of layer by its number in the model."""
        self._counter.trace.flops, self._flops[:] = 0, [0] * len(self._flops)
        batch = batch_of(self.model, pack)
        # Position embeddings and texts are as wide as the network, and their values determine no shapes.
        texts = {n: replace(x, values=x.values.to("meta")) for n, x in batch.conditions.items() if x.layout is not None}
        batch = replace(batch, positions_T3=batch.positions_T3.to("meta"), conditions=batch.conditions | texts)
        try:
            with self._counter:
                self._network(batch.latents_TC.to("meta"), torch.zeros(batch.layout.num_samples), batch)
        except Exception as error:
            if not self._is_shortened:
                raise
            raise ConfigError(
                f"{type(self.model).__name__}: the forward pass of layers {self._part.start} to {self._part.stop - 1} "
                f"without the others failed ({type(error).__name__}: {error}); if its layers differ, define "
                "`layer_kind`, which returns a different value for each kind"
            ) from error
        layers = sum(times * flops for times, flops in zip(self._times, self._flops, strict=True))
        return ForwardFlops(self._counter.trace.flops - sum(self._flops) + layers, layers)
