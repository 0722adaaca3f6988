"""Updates part by part, with Adam's moments in host memory."""

from dataclasses import dataclass, replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch

from benchmarks.parallel_training import tiny_model
from dit.backends.init import UNIT_ROWS, with_init
from dit.kernels.adamw import Elements, Rates, adamw
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer import update
from dit.optimizer.master_weights import SLOTS, MasterShard, factor_of_update
from dit.optimizer.unit_rows import UnitRows
from dit.parallel.build import count_parameters
from dit.parallel.dims import ParallelConfig
from dit.planner.job import Job
from dit.planner.trace import Tracer
from dit.settings import OptimizerConfig, TrainingConfig
from dit.tracing.packs import PackShape

RATES = Rates(lr=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2, step=3, clip=torch.tensor(0.5), average=0.3)


def parameters(*, averaged: bool, half: bool) -> list[Elements]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for shape in ((3, 5), (4,), (1,), (0,), (2, 3, 4)):
        gradient, main, first, second, average = torch.randn(5, *shape, generator=generator)
        model = main.bfloat16() if half else None
        found.append(Elements(gradient, main, first, second.square(), average if averaged else None, model))
    return found


@pytest.mark.parametrize(("averaged", "half"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("part", [1, 4, 7, 1000])
def test_partial_updates_equal_the_full_update(monkeypatch: pytest.MonkeyPatch, part: int, averaged: bool, half: bool):
    monkeypatch.setattr(update, "PART", part)
    whole, by_parts = (parameters(averaged=averaged, half=half) for _ in range(2))
    seen = []

    def counted(some: list[Elements], rates: Rates) -> None:
        seen.append(sum(p.main.numel() for p in some))
        adamw(some, rates)

    adamw(whole, RATES)
    update.with_moments_on_the_host(counted)(by_parts, RATES)
    assert sum(seen) == sum(p.main.numel() for p in whole)
    assert max(seen) <= part
    names = "main", "exp_avg", "exp_avg_sq", *("average",) * averaged, *("model",) * half
    for one, other in zip(whole, by_parts):
        for name in names:
            expected, found = getattr(one, name), getattr(other, name)
            # torch's kernel rounds the elements of full vectors differently from the remaining ones.
            torch.testing.assert_close(found, expected, rtol=1e-2 if name == "model" else 1e-6, atol=1e-7, msg=name)


@dataclass
class Queued:
    """Work on a stream of `Device`, which is the event of its end, too."""

    work: Any
    after: Optional["Queued"]
    is_done: bool = False


class Device:
    """A device that does no work until `run`; the order of streams is free, except for events."""

    def __init__(self) -> None:
        self.streams: list[list[Queued]] = []

    def stream(self, *, current: bool = False) -> Any:
        """Replace `dit.backends.device.Stream`."""
        stream: list[Queued] = []
        self.streams.append(stream)

        def queue(work: Any = lambda: None, *, after: Optional[Queued] = None) -> Queued:
            stream.append(Queued(work, after))
            return stream[-1]

        return SimpleNamespace(queue=queue)

    def run(self, order: tuple[int, ...]) -> None:
        """Do all work, always that of the first stream in an order that does not wait for an event."""
        streams = [self.streams[i] for i in order]
        while any(streams):
            first = next(s for s in streams if s and (s[0].after is None or s[0].after.is_done)).pop(0)
            first.work()
            first.is_done = True


@pytest.mark.parametrize("part", [4, 16, 1000])
@pytest.mark.parametrize("order", permutations(range(3)))
def test_copies_and_updates_may_overlap(monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...], part: int) -> None:
    """Two updates give the same bits, whichever of the three streams is ahead."""
    monkeypatch.setattr(update, "PART", part)
    in_turn, overlapping = (parameters(averaged=True, half=True) for _ in range(2))
    device, steps = Device(), (RATES, replace(RATES, step=4))
    update_in_turn = update.with_moments_on_the_host(adamw)
    monkeypatch.setattr(update, "Stream", device.stream)
    update_overlapping = update.with_moments_on_the_host(adamw)
    for rates in steps:
        update_in_turn(in_turn, rates)
        update_overlapping(overlapping, rates)
    device.run(order)
    for one, other in zip(in_turn, overlapping):
        assert all(torch.equal(value, vars(other)[name]) for name, value in vars(one).items())


def test_clipping_equals_that_of_megatron_core() -> None:
    """`clip_grad_by_total_norm_fp32` adds 1e-6 to the norm, which matters for small norms."""
    shared = torch.tensor(0.25, dtype=torch.float64)
    for norm, clip_grad, expected in (
        (2e-6, 1e-6, 1e-6 / (2e-6 + 1e-6)),
        (1e-6, 1.5e-6, 1.5e-6 / (1e-6 + 1e-6)),
        (3.0, 1.0, 1.0 / (3.0 + 1e-6)),
        (1e-6, 1.0, 1.0),
        (3.0, 0.0, 1.0),
    ):
        factor = factor_of_update(shared, torch.tensor(norm, dtype=torch.float64), clip_grad)
        assert float(factor) == pytest.approx(0.25 * expected, rel=1e-12)


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (5, 11), (0, 0)])
def test_local_parts_of_rows_are_scaled_unless_nothing_may_change(start: int, stop: int) -> None:
    """One rank with a part of a weight of three rows of four elements; no other rank adds squares."""
    weight = with_init(torch.nn.Parameter(torch.arange(1.0, 13.0).view(3, 4)), UNIT_ROWS)
    before = weight.detach().flatten()[start:stop]
    main, whole = before.clone(), torch.zeros(12)
    scale = UnitRows([MasterShard("w", weight, start, stop, main, {}, None)])
    scale(torch.tensor(False))
    assert torch.equal(main, before)
    scale(torch.tensor(True))
    whole[start:stop] = before
    rms = whole.view(3, 4).square().mean(1, keepdim=True).sqrt() + 1e-4
    torch.testing.assert_close(main, (whole.view(3, 4) / rms).flatten()[start:stop])


def test_moments_are_on_the_requested_device() -> None:
    """On the host, whatever the device of the weights; without memory on the host, next to the weights."""
    for host, device in (({slot: torch.zeros(3) for slot in SLOTS}, "cpu"), (None, "meta")):
        main = torch.zeros(3, device="meta")
        shard = MasterShard("w", torch.nn.Parameter(main), 0, 3, main, {}, None, host)
        shard.ensure_state()
        assert {slot: values.device.type for slot, values in shard.state.items()} == dict.fromkeys(SLOTS, device)
        assert host is None or all(shard.state[slot] is host[slot] for slot in SLOTS)


@pytest.mark.parametrize("data_parallel", ["distributed_optimizer", "fsdp", "ddp"])
def test_a_plan_counts_eight_bytes_per_parameter_less(one_tracer: Tracer, data_parallel: str) -> None:
    model, training = tiny_model(num_layers=1), TrainingConfig(ema_decay=None)
    parts = (model, FlowMatching(), OptimizerConfig(), ParallelConfig(data_parallel=data_parallel), training)
    job = Job(*parts, PackShape(((1, 4, 8),), text_lengths=(4,)))
    on, off = one_tracer([job, replace(job, optimizer=OptimizerConfig(offload=True))])
    count = count_parameters(model)
    assert on.state_bytes["optimizer"] - off.state_bytes["optimizer"] == pytest.approx(8 * count, rel=1e-3)
    assert off.peak < on.peak  # this small model is one part, so all moments are on the device temporarily
