"""Bad numbers on one rank of a training process, as context managers around a run."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Optional
from unittest import mock

import torch
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.layers.moe import MoE
from dit.training import pretrain
from dit.training.pretrain import Run

NAN = float("nan")


@dataclass
class Injection:
    """A fault of one sample wherever it is computed: in the data, a layer's output, or the gradient of that output.

    Attributes:
        step: training step with the sample, from 1; the sample is the second one of the step's first micro-batch.
        rank: rank with the fault; None for all.
        place: `data`, `forward`, `backward`, or `weight`: the gradient of the layer's weight.
        layer: name of a module.
        factor: factor of the affected numbers.
        times: largest number of occurrences.
    """

    step: int
    rank: Optional[int]
    place: str
    layer: str = ""
    factor: float = NAN
    times: int = 1_000_000
    key: Optional[str] = field(default=None, init=False)
    batch: Optional[PackedBatch] = field(default=None, init=False)

    def happens(self) -> bool:
        """Return whether the fault occurs in this micro-batch on this rank, and count it."""
        if self.batch is None or self.key not in self.batch.keys or not self.times or not self._here():
            return False
        self.times -= 1
        return True

    def _here(self) -> bool:
        return self.rank is None or torch.distributed.get_rank() == self.rank

    def spoil(self, values: Tensor, batch: Optional[PackedBatch] = None) -> Tensor:
        """Return the values of all local tokens of a micro-batch (None: the newest) with the sample's multiplied."""
        batch = batch or self.batch
        assert batch is not None
        layout, row = batch.layout, batch.keys.index(self.key)
        of_sample_T = layout.segment_ids_T == row
        assert len(values) == len(of_sample_T), "choose a layer that returns tokens"
        return torch.where(of_sample_T.view(-1, *[1] * (values.dim() - 1)), values * self.factor, values)

    def install(self, run: Run) -> None:
        """Register the fault in a run."""
        if self.place == "data":
            run.batches._stream = _Spoiled(run, self)  # type: ignore[assignment]
            return
        for chunk in run.state.chunks:
            for name, module in chunk.named_modules():
                if name == self.layer and self.place == "weight":
                    weight: Any = module.weight
                    getattr(weight, "orig_param", weight).register_hook(self._of_weight)  # FSDP's has the gradient
                elif name == self.layer:
                    module.register_forward_hook(self._of_output)

    def _of_weight(self, gradient: Tensor) -> Tensor:
        return gradient * self.factor if self.happens() else gradient

    def _of_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        first, *rest = output if isinstance(output, tuple) else (output,)
        if self.place == "forward" and self.happens():
            first = self.spoil(first)
        elif self.place == "backward" and self.happens():
            first.register_hook(partial(self.spoil, batch=self.batch))  # other forward passes may come in between
        return (first, *rest) if isinstance(output, tuple) else first

    def note(self, step: int, batch: PackedBatch) -> None:
        """Record the next micro-batch."""
        self.batch = batch
        if step == self.step and self.key is None:
            self.key = batch.keys[1]


class _Spoiled:
    """A stream in which one sample's latents are multiplied."""

    def __init__(self, run: Run, injection: Injection) -> None:
        self._run, self._stream, self._injection = run, run.batches._stream, injection

    def __next__(self) -> PackedBatch:
        batch = next(self._stream)
        self._injection.note(self._run.state.step + 1, batch)
        if self._injection.happens():
            batch = replace(batch, latents_TC=self._injection.spoil(batch.latents_TC))
        return batch


@contextlib.contextmanager
def after_build(act: Callable[[Run], None]) -> Iterator[None]:
    """Call a function with each run after its construction."""
    build = Run.__init__

    def built(self: Run, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        act(self)

    with mock.patch.object(Run, "__init__", built):
        yield


@contextlib.contextmanager
def injected(*settings: dict[str, Any]) -> Iterator[None]:
    """Inject faults; see `Injection` for their settings."""
    faults = [Injection(**values) for values in settings]
    forward_step = pretrain.training_forward_step

    def watched(objective: Any, model: Any, seed: int, done: int, *more: Any) -> Any:
        original = forward_step(objective, model, seed, done, *more)

        def noted(batches: Iterator[PackedBatch], network: nn.Module) -> Any:
            batch = next(batches)
            for fault in faults:
                fault.note(done + 1, batch)
            return original(iter([batch]), network)

        return noted

    def install(run: Run) -> None:
        for fault in faults:
            fault.install(run)

    with mock.patch.object(pretrain, "training_forward_step", watched), after_build(install):
        yield


@contextlib.contextmanager
def left_out(*steps: int) -> Iterator[None]:
    """Omit the updates of some steps, as one would do by hand without the guard.

    The loss and norm of every step are read at once.
    """
    done = Run.step

    def step(self: Run, loss_sums: Tensor, *, late: bool) -> float:
        out = self.state.step + 1 in steps
        nothing = mock.patch.object(self.state, "update")
        loads = [m.load for chunk in self.state.chunks for m in chunk.modules() if isinstance(m, MoE)]
        before, counts = loss_sums.clone(), [load._counts for load in loads]
        with nothing if out else contextlib.nullcontext():
            norm = done(self, loss_sums)
        if out:
            loss_sums.copy_(before)
            for load, count in zip(loads, counts):
                load._counts = count
        return norm

    with mock.patch.object(Run, "step", step):
        yield


def data_passed_over(micro_batches: int) -> contextlib.AbstractContextManager[None]:
    """Read and discard some micro-batches before a run starts."""

    def read(run: Run) -> None:
        for _ in range(micro_batches):
            next(run.state.stream)

    return after_build(read)


@contextlib.contextmanager
def killed_at_rewind(*, saved: bool) -> Iterator[None]:
    """End this process at a rewind: before the restored checkpoint is saved again, or after."""
    rewind = Run.rewind

    def dying(self: Run, bad_step: int) -> None:
        if saved:
            rewind(self, bad_step)
        raise ProcessDied

    with mock.patch.object(Run, "rewind", dying):
        yield


class ProcessDied(BaseException):
    """No code in a run catches this, so its folder is like that of a killed process, except for the exit record."""
