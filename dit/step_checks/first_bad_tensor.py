"""Search for the first tensor that is not finite: compute a step again and check the output of every module.

Noise, dropout and dropped conditions are counter-based and the weights have not changed, so the second computation
repeats the first one bitwise. If it does not, the machine made an error in one of them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dit.backends.pending_bias import PendingBias
from dit.backends.process_groups import all_reduce, gather_objects
from dit.batch import PackedBatch
from dit.checkpoint.train_state import TrainState
from dit.kernels.layer_kernels import PendingResidual
from dit.kernels.recompute import first_run
from dit.layout import SequenceLayout
from dit.objectives.base import Objective
from dit.patchify import split_outputs
from dit.step.forward_step import ForwardStep, Logged
from dit.step.schedule import Logs
from dit.step.train_step import compute_gradients

PHASES = ("data", "noised input", "forward", "target", "loss", "backward", "weight gradient")
NUM_WORST = 4  # samples with the largest loss that each rank names


@dataclass(frozen=True)
class Location:
    """Location of a number that is not finite.

    Attributes:
        order: sort key over ranks: micro-batch, phase, stage in the order of the phase, number of the check.
        layer: name of the module, or of the tensor.
        samples: keys of the samples with this number among their tokens; empty if it belongs to no sample.
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
    """A micro-batch of the step, and its number from 0."""

    number: int
    batch: PackedBatch


class Probe:
    """Checks every tensor between the data and the gradients of one step.

    Args:
        channels: channels of a latent token and of the model's latents, see `split_outputs`.

    Attributes:
        first: location of the first number of this rank that is not finite; None if all are finite.
        worst: samples of this rank with the largest mean loss per token, largest first.
        layers: by "phase module", the largest absolute value and the number of values that are not finite.
    """

    def __init__(self, state: TrainState, objective: Objective, channels: tuple[int, int]) -> None:
        self._state, self._chunks, self._groups = state, state.chunks, state.groups
        self._objective, self._channels = objective, channels
        self.first: Optional[Location] = None
        self.worst: list[tuple[str, float]] = []
        self.layers: dict[str, tuple[float, int]] = {}
        self._checks = 0
        # For each chunk, the newest micro-batch of a forward pass and of a backward pass: in a pipeline, forward passes
        # of other micro-batches lie between the two.
        self._forward: list[Optional[MicroBatch]] = [None] * len(self._chunks)
        self._backward: list[Optional[MicroBatch]] = [None] * len(self._chunks)
        self._losses: dict[str, tuple[float, float]] = {}  # loss and noised tokens of the local part of a sample

    def run(self, forward_step: ForwardStep, batches: Sequence[PackedBatch]) -> Logs:
        """Compute the step again, which overwrites the gradients; every rank calls this."""
        device = next(self._chunks[0].parameters()).device
        with ExitStack() as hooks:
            for i, chunk in enumerate(self._chunks):
                for handle in self._hooks(i, chunk):
                    hooks.enter_context(handle)
            on_device = (batch.to(device) for batch in batches)
            logs = compute_gradients(self._state, self._checked(forward_step), len(batches), on_device)
        ranked = sorted(
            self._mean_losses(device).items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1]
        )
        self.worst = ranked[:NUM_WORST]
        return logs

    def _checked(self, forward_step: ForwardStep) -> ForwardStep:
        chunks = {id(network): i for i, network in enumerate(self._state.wrapped)}

        def checked(batches: Iterator[PackedBatch], network: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            chunk = chunks[id(network)]
            batch, before = next(batches), self._forward[chunk]
            now = self._forward[chunk] = MicroBatch(0 if before is None else before.number + 1, batch)
            self._check_data(chunk, now)
            prediction_TC, loss = forward_step(iter([batch]), network)
            prepared, loss_batch = loss.args  # type: ignore[attr-defined]
            if self._chunks[chunk].stage.first:
                self._check("noised input", "inputs", prepared.inputs_TC, chunk, batch.layout, now)

            def checked_loss(prediction_TC: Tensor) -> tuple[Tensor, Tensor, Logged]:
                self._check("target", "target", prepared.target_TC, chunk, batch.layout, now)
                self._check_losses(prediction_TC.detach(), prepared, loss_batch, chunk, now)
                return loss(prediction_TC)

            return prediction_TC, checked_loss

        return checked

    def _check_data(self, chunk: int, now: MicroBatch) -> None:
        batch = now.batch
        self._check("data", "latents", batch.latents_TC, chunk, batch.layout, now)
        for name, values in batch.conditions.items():
            if values.values.is_floating_point():
                layout = values.layout if values.layout is not None else batch.layout
                self._check("data", name, values.values, chunk, layout, now)

    def _check_losses(
        self, prediction_TC: Tensor, prepared: Any, batch: PackedBatch, chunk: int, now: MicroBatch
    ) -> None:
        outputs_TC = split_outputs(prediction_TC, *self._channels, self._objective.num_outputs)
        terms = self._objective.loss_terms(outputs_TC, prepared, batch.layout)
        loss_L = torch.stack([terms[name].sum_per_level(batch.layout) for name in self._objective.terms]).sum(0)
        loss_S = batch.layout.sum_levels(loss_L)
        self._check("loss", "loss", loss_S, chunk, batch.layout, now)
        tokens_S = batch.layout.sum_per_sample(batch.layout.noised_T.float())
        self._losses |= zip(batch.keys, zip(loss_S.tolist(), tokens_S.tolist()))

    def _mean_losses(self, device: torch.device) -> dict[str, float]:
        """Return the mean loss per token of each sample, whose tokens may be split over context-parallel ranks."""
        sums = torch.tensor(list(self._losses.values()), device=device)
        if self._losses:  # on all ranks of the last pipeline stage
            all_reduce(sums, self._groups.cp)
        return {key: loss / max(tokens, 1.0) for key, (loss, tokens) in zip(self._losses, sums.tolist())}

    def _hooks(self, chunk: int, model: nn.Module) -> Iterator[Any]:
        for name, module in model.named_modules():
            if name:
                yield module.register_forward_hook(partial(self._check_output, chunk, name), with_kwargs=True)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # Between steps, Megatron-FSDP's parameters are shards; hooks belong to the original parameters.
                parameter = getattr(parameter, "orig_param", parameter)
                yield parameter.register_hook(partial(self._check_weight_gradient, chunk, name))

    def _check_weight_gradient(self, chunk: int, name: str, gradient: Tensor) -> None:
        """Check the local gradient of a micro-batch, before it is accumulated and reduced."""
        now = self._backward[chunk] or self._forward[chunk]
        assert now is not None
        self._check("weight gradient", name, gradient, chunk, None, now)

    def _check_output(self, chunk: int, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = [*args, *kwargs.values()]
        # A backward pass recomputes activations of its own micro-batch.
        now = self._forward[chunk] if first_run() else self._backward[chunk] or self._forward[chunk]
        assert now is not None
        layout = next((x for x in inputs if isinstance(x, SequenceLayout)), now.batch.layout)
        for tensor in _tensors(inputs):
            if tensor.requires_grad:
                _readers(tensor).append(name)
        for part in output if type(output) is tuple else (output,):
            if isinstance(part, PendingResidual):  # the sum may overflow although its summands are finite
                with torch.no_grad():
                    self._check("forward", name, PendingResidual.added(part), chunk, layout, now)
        for tensor in _tensors(output):
            self._check("forward", name, tensor.detach(), chunk, layout, now)
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._check_gradient, chunk, name, _readers(tensor), layout, now))
        if isinstance(output, PendingBias) and output.bias is not None:
            self._check("forward", name, output.bias, chunk, None, now)

    def _check_gradient(
        self, chunk: int, name: str, readers: list[str], layout: SequenceLayout, of: MicroBatch, gradient: Tensor
    ) -> None:
        """Check the gradient of an output, which comes from the backward passes of the modules that read it."""
        self._backward[chunk] = of
        innermost = [r for r in readers if not any(other.startswith(f"{r}.") for other in readers)]
        innermost = [r for r in innermost if not f"{name}.".startswith(f"{r}.")]
        layer = " or ".join(dict.fromkeys(innermost)) or f"the reader of {name}"
        self._check("backward", layer, gradient.detach(), chunk, layout, of)

    def _check(
        self,
        phase: str,
        layer: str,
        values: Tensor,
        chunk: int,
        layout: Optional[SequenceLayout],
        of: MicroBatch,
    ) -> None:
        self._checks += 1
        values = values.detach()
        if values.numel() == 0:
            return
        bad = ~values.isfinite()
        count = int(bad.sum())
        largest = float(torch.where(bad, 0.0, values.abs().float()).max())
        before = self.layers.get(f"{phase} {layer}", (0.0, 0))
        self.layers[f"{phase} {layer}"] = max(before[0], largest), before[1] + count
        if not count:
            return
        pp = self._groups.pp
        stage = chunk * pp.size() + pp.rank()
        stage = -stage if phase == "backward" else stage
        order = (of.number, PHASES.index(phase), stage, self._checks)
        if self.first is None or order < self.first.order:
            samples = () if layout is None else _samples(bad, layout, of.batch)
            self.first = Location(order, self._groups.rank, phase, layer, samples)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors among values, without a pending bias, which is a parameter, and its gate."""
    values = values.y if isinstance(values, PendingBias) else values
    if isinstance(values, PendingResidual) or not isinstance(values, (tuple, list)):
        values = (values,)
    for value in values:
        parts = (value.x_TD, value.y_TD) if isinstance(value, PendingResidual) else (value,)
        yield from (x for x in parts if isinstance(x, Tensor) and x.is_floating_point())


def _readers(tensor: Tensor) -> list[str]:
    """Return the list of modules that read a tensor; it is an attribute of the tensor."""
    if not hasattr(tensor, "_read_by"):
        tensor._read_by = []  # type: ignore[attr-defined]
    return tensor._read_by  # type: ignore[attr-defined]


def _samples(bad: Tensor, layout: SequenceLayout, batch: PackedBatch) -> tuple[str, ...]:
    """Return the keys of the samples whose rows have bad values; empty if the rows belong to no known samples."""
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


def find_first(
    probe: Probe, forward_step: ForwardStep, batches: Sequence[PackedBatch], first_sums: Tensor
) -> tuple[Optional[Location], dict[str, Any]]:
    """Compute a step again and find its first number that is not finite; every rank calls this and gets the same.

    Args:
        first_sums: sums of the loss function in the first computation; NaN equals NaN.

    Returns:
        The first location over all ranks, None if all numbers were finite; and the report: this location, whether the
        sums repeated on every rank, the worst samples of each rank, and the table of layers of the rank with the
        location (of rank 0 without one).
    """
    sums = sum((log["sums"] for log in probe.run(forward_step, batches)), torch.zeros_like(first_sums))
    repeats = bool(torch.equal(sums.nan_to_num(), first_sums.nan_to_num()))
    gathered = gather_objects((probe.first, repeats, probe.worst))
    locations = [location for location, _, _ in gathered if location is not None]
    first = min(locations, key=lambda location: location.order, default=None)
    reporting_rank = 0 if first is None else first.rank
    table = [probe.layers]
    dist.broadcast_object_list(table, src=reporting_rank)
    report = {
        "first": None if first is None else {**asdict(first), "text": str(first)},
        "repeats": all(repeats for _, repeats, _ in gathered),
        "worst_samples": {rank: worst for rank, (_, _, worst) in enumerate(gathered) if worst},
        "layers_of_rank": reporting_rank,
        "layers": {name: {"largest": value, "not_finite": count} for name, (value, count) in table[0].items()},
    }
    return first, report
