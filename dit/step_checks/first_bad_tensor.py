"""Where bad numbers began: compute a step again on the same micro-batches, and look at what every module returns.

Noise, dropout and dropped conditions are counter-based and the weights are those before the step, so the numbers are
those of the first time, to the bit. If they are not, the first time had a fault of the machine.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.kernels.recompute import first_run
from dit.layout import SequenceLayout
from dit.objectives.base import Objective
from dit.patchify import split_outputs
from dit.step.forward_step import ForwardStep, Logged
from dit.step.schedule import forward_backward

PHASES = ("data", "noised input", "forward", "target", "loss", "backward", "weight gradient")
NUM_WORST = 4  # samples with the largest loss that each rank names


@dataclass(frozen=True)
class Place:
    """Where a number that is not finite was first seen.

    Attributes:
        order: sort key over ranks: micro-batch, phase, stage in the order of the phase, number of the look.
        rank: that saw it.
        phase: one of `PHASES`.
        layer: name of the module, or of the tensor.
        samples: keys of the samples in whose tokens it was; empty if it belongs to none.
    """

    order: tuple[int, int, int, int]
    rank: int
    phase: str
    layer: str
    samples: tuple[str, ...]

    def __str__(self) -> str:
        where = {
            "data": f"in the data ({self.layer})",
            "noised input": "in the noised input",
            "forward": f"in the output of {self.layer}",
            "target": "in the target",
            "loss": "in the loss",
            "backward": f"in the backward pass of {self.layer}",
            "weight gradient": f"in the gradient of the weight {self.layer}",
        }[self.phase]
        return f"{where} on rank {self.rank}" + (f", sample {', '.join(self.samples)}" if self.samples else "")


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of the step that is computed again, and its number, from 0."""

    number: int
    batch: PackedBatch


@dataclass
class Found:
    """What one rank found in the second computation of a step.

    Attributes:
        first: where the first number that is not finite was; None if there was none.
        repeats: whether the sums of the losses are those of the first computation, to the bit.
        worst: the samples with the largest mean loss of a token on this rank, worst first.
        layers: by "phase module": the largest absolute value, and how many values were not finite.
    """

    first: Optional[Place] = None
    repeats: bool = True
    worst: list[tuple[str, float]] = field(default_factory=list)
    layers: dict[str, tuple[float, int]] = field(default_factory=dict)


class Probe:
    """Looks at every tensor between the data and the gradients of one step.

    Args:
        chunks: this rank's unwrapped model chunks.
        wrapped: the same in their wrappers.
        objective: of the run.
        channels: of a latent token, and of the model's latents, see `split_outputs`.
        groups: the process groups.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        wrapped: Sequence[Any],
        objective: Objective,
        channels: tuple[int, int],
        groups: ProcessGroups,
    ) -> None:
        self._chunks, self._wrapped, self._objective = chunks, wrapped, objective
        self._channels, self._groups = channels, groups
        self.found = Found()
        self._looks = 0
        # Of each chunk, the newest micro-batch that went forward, and the newest that came back: under pipeline
        # parallelism the backward pass of one follows the forward pass of others.
        self._forward: list[Optional[MicroBatch]] = [None] * len(chunks)
        self._backward: list[Optional[MicroBatch]] = [None] * len(chunks)
        self._losses: dict[str, float] = {}

    def run(self, forward_step: ForwardStep, batches: Sequence[PackedBatch]) -> list[dict[str, Any]]:
        """Compute the step again; every rank calls this. Gradient buffers hold its gradients afterwards.

        Returns:
            The logs of each micro-batch, as `forward_backward` does.
        """
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        device = next(self._chunks[0].parameters()).device
        handles = [handle for i, chunk in enumerate(self._chunks) for handle in self._hooks(i, chunk)]
        try:
            moved = (batch.to(device) for batch in batches)
            watched = self._watched(forward_step)
            logs = forward_backward(watched, moved, self._wrapped, len(batches), self._groups)
        finally:
            for handle in handles:
                handle.remove()
        ranked = sorted(self._losses.items(), key=lambda item: -math.inf if item[1] != item[1] else -item[1])
        self.found.worst = ranked[:NUM_WORST]
        return logs

    def _watched(self, forward_step: ForwardStep) -> ForwardStep:
        places = {id(network): i for i, network in enumerate(self._wrapped)}

        def watched(batches: Iterator[PackedBatch], network: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            chunk = places[id(network)]
            batch, before = next(batches), self._forward[chunk]
            now = self._forward[chunk] = MicroBatch(0 if before is None else before.number + 1, batch)
            self._look_at_data(chunk, now)
            prediction_TC, loss = forward_step(iter([batch]), network)
            prepared, given = loss.args  # type: ignore[attr-defined]
            if self._chunks[chunk].stage.first:  # type: ignore[union-attr]
                self._look("noised input", "inputs", prepared.inputs_TC, chunk, batch.layout, now)

            def loss_seen(prediction_TC: Tensor) -> tuple[Tensor, Tensor, Logged]:
                self._look("target", "target", prepared.target_TC, chunk, batch.layout, now)
                self._look_at_losses(prediction_TC.detach(), prepared, given, chunk, now)
                return loss(prediction_TC)

            return prediction_TC, loss_seen

        return watched

    def _look_at_data(self, chunk: int, now: MicroBatch) -> None:
        batch = now.batch
        self._look("data", "latents", batch.latents_TC, chunk, batch.layout, now)
        for name, values in batch.conditions.items():
            if values.values.is_floating_point():
                layout = values.layout if values.layout is not None else batch.layout
                self._look("data", name, values.values, chunk, layout, now)

    def _look_at_losses(
        self, prediction_TC: Tensor, prepared: Any, batch: PackedBatch, chunk: int, now: MicroBatch
    ) -> None:
        outputs_TC = split_outputs(prediction_TC, *self._channels)
        terms = self._objective.loss_terms(outputs_TC, prepared, batch.layout)
        loss_S = torch.stack([terms[name].sum_per_sample(batch.layout) for name in self._objective.terms]).sum(0)
        self._look("loss", "loss", loss_S, chunk, batch.layout, now)
        tokens_S = batch.layout.sum_per_sample(batch.layout.valid_T.float()).clamp(min=1.0)
        for key, loss in zip(batch.keys, (loss_S / tokens_S).tolist()):
            self._losses[key] = loss

    def _hooks(self, chunk: int, model: nn.Module) -> Iterator[Any]:
        for name, module in model.named_modules():
            if name:
                yield module.register_forward_hook(self._forward_hook(chunk, name), with_kwargs=True)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # Megatron-FSDP's parameters are shards between steps; these have the gradient.
                parameter = getattr(parameter, "orig_param", parameter)
                yield parameter.register_hook(self._weight_hook(chunk, name))

    def _weight_hook(self, chunk: int, name: str) -> Callable[[Tensor], None]:
        """Return what looks at this rank's gradient of a micro-batch, before it is added and perhaps reduced."""

        def hook(gradient: Tensor) -> None:
            now = self._backward[chunk] or self._forward[chunk]
            assert now is not None
            self._look("weight gradient", name, gradient, chunk, None, now)

        return hook

    def _forward_hook(self, chunk: int, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = [*args, *kwargs.values()]
            # A backward pass recomputes activations of its own micro-batch.
            now = self._forward[chunk] if first_run() else self._backward[chunk] or self._forward[chunk]
            assert now is not None
            layout = next((x for x in given if isinstance(x, SequenceLayout)), now.batch.layout)
            for tensor in _tensors(given):
                if tensor.requires_grad:
                    _readers(tensor).append(name)
            for tensor in _tensors(output):
                self._look("forward", name, tensor.detach(), chunk, layout, now)
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._gradient_hook(chunk, name, _readers(tensor), layout, now))

        return hook

    def _gradient_hook(
        self, chunk: int, name: str, readers: list[str], layout: SequenceLayout, of: MicroBatch
    ) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._backward[chunk] = of
            # The gradient of an output comes out of the backward passes of the modules that read it.
            inner = [r for r in readers if not any(other.startswith(f"{r}.") for other in readers)]
            inner = [r for r in inner if not f"{name}.".startswith(f"{r}.")]
            named = " or ".join(dict.fromkeys(inner)) or f"what reads {name}"
            self._look("backward", named, gradient.detach(), chunk, layout, of)

        return hook

    def _look(
        self,
        phase: str,
        layer: str,
        values: Tensor,
        chunk: int,
        layout: Optional[SequenceLayout],
        of: MicroBatch,
    ) -> None:
        self._looks += 1
        values = values.detach()
        if values.numel() == 0:
            return
        bad = ~values.isfinite()
        count = int(bad.sum())
        largest = float(torch.where(bad, 0.0, values.abs().float()).max())
        before = self.found.layers.get(f"{phase} {layer}", (0.0, 0))
        self.found.layers[f"{phase} {layer}"] = max(before[0], largest), before[1] + count
        if not count:
            return
        pp, place = self._groups.pp, PHASES.index(phase)
        stage = chunk * pp.size() + pp.rank()
        stage = -stage if phase == "backward" else stage
        order = (of.number, place, stage, self._looks)
        if self.found.first is None or order < self.found.first.order:
            samples = () if layout is None else _samples(bad, layout, of.batch)
            self.found.first = Place(order, self._groups.rank, phase, layer, samples)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors among values."""
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value


def _readers(tensor: Tensor) -> list[str]:
    """Return the list of modules that read a tensor, which lives as long as the tensor does."""
    if not hasattr(tensor, "_read_by"):
        tensor._read_by = []  # type: ignore[attr-defined]
    return tensor._read_by  # type: ignore[attr-defined]


def _samples(bad: Tensor, layout: SequenceLayout, batch: PackedBatch) -> tuple[str, ...]:
    """Return the keys of the samples to which the rows of a tensor with bad values belong; none if that is unknown."""
    rows = bad.flatten(1).any(1) if bad.dim() > 1 else bad
    if layout.num_samples != len(batch.keys):
        return ()
    if len(rows) == layout.num_local_tokens:
        indices = layout.segment_ids_T.to(rows.device)[rows].unique().tolist()
    elif len(rows) == layout.num_samples:
        indices = rows.nonzero()[:, 0].tolist()
    else:
        return ()
    return tuple(batch.keys[i] for i in indices)


def find_culprit(
    probe: Probe,
    forward_step: ForwardStep,
    batches: Sequence[PackedBatch],
    first_sums: Tensor,
    groups: ProcessGroups,
) -> tuple[Optional[Place], dict[str, Any]]:
    """Compute a step again and say where its bad numbers began; every rank calls this and gets the same.

    Args:
        batches: the micro-batches of this rank.
        first_sums: the sums that the loss function returned the first time, over the micro-batches; NaN equals NaN.

    Returns:
        The first place over all ranks, None if all numbers were finite; and the report: that place, whether the numbers
        were those of the first time on every rank, the worst samples of each rank, and the table of layers of the rank
        with the place (of rank 0 if there is none).
    """
    sums = torch.zeros_like(first_sums)
    for logs in probe.run(forward_step, batches):
        sums += logs["sums"]
    found = probe.found
    found.repeats = bool(torch.equal(sums.nan_to_num(), first_sums.nan_to_num()))
    gathered: list[Any] = [None] * groups.world_size
    dist.all_gather_object(gathered, (found.first, found.repeats, found.worst))
    places = [first for first, _, _ in gathered if first is not None]
    first = min(places, key=lambda place: place.order, default=None)
    teller = 0 if first is None else first.rank
    table = [found.layers]
    dist.broadcast_object_list(table, src=teller)
    report = {
        "first": None if first is None else {**asdict(first), "text": str(first)},
        "repeats": all(repeats for _, repeats, _ in gathered),
        "worst_samples": {rank: worst for rank, (_, _, worst) in enumerate(gathered) if worst},
        "layers_of_rank": teller,
        "layers": {name: {"largest": value, "not_finite": count} for name, (value, count) in table[0].items()},
    }
    return first, report
