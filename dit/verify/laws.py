"""Consistency checks of a model and its training step on one rank.

Comparing a layout with one rank cannot find an error that both have. These checks compare one rank with itself:

    padding        values in the padding of tokens and texts change no output and no gradient
    packed         a sample has the same output and adds the same gradient in a pack, with padding after the sample and
                   after its text, as in a batch with no other sample and no padding
    order          the order of samples in a pack changes no output and no gradient
    accumulated    two micro-batches give the gradients of one micro-batch with all samples
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dit.backends import process_groups
from dit.backends.device import local_device
from dit.batch import PackedBatch
from dit.conditions import Entry
from dit.layout import SequenceLayout
from dit.models.base import ModelConfig
from dit.verify.compare import largest_error, relative_errors, tensor_errors
from dit.verify.public import compare_public
from dit.verify.trial import Trial, build_chunks, train

SAMPLES = (0, 1, 2, 3)
HALVES = (0, 1), (2, 3)
ORDER = (2, 0, 3, 1)
TIMES = (0.1, 0.4, 0.6, 0.9)
"""Time of each sample of `SAMPLES`."""
MULTIPLE, TAIL = 10, 16
"""In tokens: sample lengths are padded to a multiple of MULTIPLE, and TAIL tokens follow the last sample."""
FILLS = (0.0, float("nan"), 1e30)
"""Values written to the padding."""
RTOL = 1e-4
"""Largest accepted relative error of an fp32 gradient that is summed in another order."""
MOST_NAMES = 4


class Packs(Protocol):
    """Builds synthetic packs of numbered samples; picklable, because it is sent to the rank's process."""

    def __call__(self, numbers: Sequence[int], *, multiple_of: int = 1, tail: int = 0) -> PackedBatch: ...


@dataclass(frozen=True)
class Groups:
    """A stream for `Trial` that repeats the same packs in every step."""

    packs: Packs
    groups: Sequence[Sequence[int]]

    def __call__(self, dp_rank: int, dp_size: int, token_multiple: int) -> Iterator[PackedBatch]:
        while True:
            yield from map(self.packs, self.groups)


def passed(model: nn.Module, batch: PackedBatch, time_S: Tensor, fill: float = 0.0) -> dict[str, Tensor]:
    """Run one forward and backward pass.

    Args:
        fill: value written to padded tokens.

    Returns:
        The output of each sample by sample key, and the gradient of each parameter by name.
    """
    device = next(model.parameters()).device
    batch, time_S = batch.to(device), time_S.to(device)
    layout = batch.layout
    model.zero_grad(set_to_none=True)
    outputs_TC = model(batch.latents_TC.masked_fill(~layout.valid_T[:, None], fill), time_S, batch)
    outputs_TC[layout.valid_T].square().sum().backward()
    places = zip(batch.keys, layout.starts, layout.lengths, strict=True)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients
    return {key: outputs_TC.detach()[start : start + length] for key, start, length in places} | gradients


def half_dropped(model: ModelConfig, batch: PackedBatch) -> PackedBatch:
    """Drop the conditions of every second sample."""
    draw_S = torch.arange(batch.layout.num_samples) % 2.0
    return replace(batch, conditions=batch.conditions.drop(model.conditions(), lambda _: draw_S, batch.layout))


def padded_texts(batch: PackedBatch, fill: float) -> PackedBatch:
    """Pad every text to a multiple of four tokens."""
    texts = {}
    for name, entry in batch.conditions.items():
        if entry.layout is not None:
            layout = SequenceLayout.from_lengths(entry.layout.lengths, multiple_of=4, may_be_empty=True)
            values = layout.insert_padding(entry.values).masked_fill(~layout.valid_T[:, None], fill)
            texts[name] = Entry("text", values, layout, entry.dropped_S)
    return replace(batch, conditions=batch.conditions | texts)


def times(numbers: Sequence[int]) -> Tensor:
    """Return the time of each sample, `[S]`."""
    return torch.tensor([TIMES[number] for number in numbers])


def check_padding(network: nn.Module, model: ModelConfig, packs: Packs) -> dict[str, float]:
    """Compare padding of zeros with other padding values; the conditions of every second sample are dropped."""
    batch = half_dropped(model, packs(SAMPLES, multiple_of=MULTIPLE, tail=TAIL))
    assert not batch.layout.valid_T.all()
    zeros, *others = (passed(network, padded_texts(batch, fill), times(SAMPLES), fill) for fill in FILLS)
    errors = [tensor_errors(zeros, other) for other in others]
    return {name: largest_error(error[name] for error in errors) for name in errors[0]}


def check_packed(network: nn.Module, packs: Packs) -> dict[str, float]:
    """Compare a pack with the sum of its samples' gradients, each computed separately."""
    batch = padded_texts(packs(SAMPLES, multiple_of=MULTIPLE, tail=TAIL), 0.0)
    together = passed(network, batch, times(SAMPLES))
    single: dict[str, Tensor] = {}
    for number in SAMPLES:
        for name, value in passed(network, packs([number]), times([number])).items():
            single[name] = single[name] + value if name in single else value
    return tensor_errors(single, together)


def check_order(network: nn.Module, packs: Packs) -> dict[str, float]:
    """Compare a pack with the same samples in another order."""
    return tensor_errors(*(passed(network, packs(order), times(order)) for order in (SAMPLES, ORDER)))


def check_accumulated(trial: Trial, packs: Packs) -> dict[str, float]:
    """Compare two micro-batches with one that has all their samples: losses of all steps, gradients of the first."""
    one, two = (
        train(replace(trial, stream=Groups(packs, g), training=replace(trial.training, global_batch_size=len(g))))
        for g in ((SAMPLES,), HALVES)
    )
    losses = relative_errors(one["losses"], two["losses"])
    return {f"loss of {step}": e for step, e in losses.items()} | tensor_errors(one["gradients"], two["gradients"])


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        note: class compared with, or the reason why nothing was compared.
    """

    errors: Mapping[str, float]
    bound: float = RTOL
    note: str = ""

    @property
    def wrong(self) -> list[str]:
        return [name for name, error in self.errors.items() if not error <= self.bound]

    def line(self, name: str) -> str:
        if not self.errors:
            return f"  {name:<12}not compared: {self.note}"
        line = f"  {name:<12}{largest_error(self.errors.values()):.1e} (bound {self.bound:.0e})"
        line += f", {self.note}" if self.note else ""
        if self.wrong:
            first = ", ".join(f"{output} ({self.errors[output]:.1e})" for output in self.wrong[:MOST_NAMES])
            line += f"; {len(self.wrong)} of {len(self.errors)} differ: {first}"
        return line


def run_case(case: dict[str, Any]) -> dict[str, Check]:
    """Run all checks of `case["trial"]` on `case["packs"]`: a task of `dit.verify.ranks.run_world`."""
    trial: Trial = case["trial"]
    packs: Packs = case["packs"]
    _, (network,) = build_chunks(trial)
    model = trial.model
    checks = {
        "padding": Check(check_padding(network, model, packs), bound=0.0),
        "packed": Check(check_packed(network, packs)),
        "order": Check(check_order(network, packs)),
    }
    note, errors = compare_public(network, model, packs([case["square"]]).to(local_device()))
    process_groups.release()
    return {**checks, "accumulated": Check(check_accumulated(trial, packs)), "diffusers": Check(errors, note=note)}


def text(checks: Mapping[str, Check]) -> str:
    """Format the results of all checks, one line each."""
    return "\n".join(["checks of one rank, largest relative errors:", *(c.line(name) for name, c in checks.items())])
