"""Rates and gradient norms that a step reports."""

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from dit.backends.device import peak_flops
from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.data_api import SampleCounts
from dit.monitoring.flops import PackFlops
from dit.optimizer.part_norms import part_of
from dit.step.forward_step import training_forward_step
from dit.training import rates
from dit.training.pretrain import Run, train
from energon_data.streams import StreamGroup
from tests.support.tiny_runs import ONE_STREAM, finish, tiny_run

pytestmark = pytest.mark.usefixtures("one_rank_world")


def by_autograd(run: Run) -> dict[str, torch.Tensor]:
    """Return the gradients of the next step by name, from torch.autograd, without Megatron-Core's hooks."""
    config, (chunk,) = run.config, run.state.chunks
    forward = training_forward_step(config.objective, config.model, config.training.seed, run.state.step)
    prediction_TC, loss_function = forward(iter([run.batches.peek()]), chunk)
    total, count, _ = loss_function(prediction_TC)
    names, parameters = zip(*chunk.named_parameters())
    return dict(zip(names, torch.autograd.grad(total / count, parameters, materialize_grads=True)))


def test_norms_of_parts_equal_autograd_in_logged_steps_only(tmp_path, one_rank_world: ProcessGroups) -> None:
    run = tiny_run(tmp_path, one_rank_world, *ONE_STREAM, "optimizer.clip_grad=0", "training.log_interval=2")
    sums = torch.zeros(2)
    run.step(sums)
    assert run.part_norms.take() == {}
    expected: dict[str, float] = {}
    for name, gradient in by_autograd(run).items():
        expected[f"grad_norm/{part_of(name)}"] = expected.get(f"grad_norm/{part_of(name)}", 0.0) + float(
            gradient.double().square().sum()
        )
    grad_norm = run.step(sums)
    measured = run.part_norms.take()
    assert measured == pytest.approx({part: square**0.5 for part, square in expected.items()}, rel=1e-5)
    assert sum(norm**2 for norm in measured.values()) == pytest.approx(grad_norm**2, rel=1e-5)
    assert {"grad_norm/embed", "grad_norm/layers.attention", "grad_norm/head"} < set(measured)
    assert run.part_norms.take() == {}
    run.close()


@pytest.mark.parametrize("reads", [True, False])
def test_operations_are_counted_once_per_replica(
    tmp_path, one_rank_world: ProcessGroups, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """The first pack of each shape is traced, and `rates` adds the counts of data readers only."""

    class Groups(ProcessGroups):
        is_data_reader = reads  # type: ignore[assignment]

    counted: list[PackedBatch] = []
    monkeypatch.setattr(PackFlops, "of_pack", lambda _, pack: len(counted.append(pack) or counted))
    run = tiny_run(tmp_path, Groups(**vars(one_rank_world)), *ONE_STREAM)
    run.step(torch.zeros(2))
    run.close()
    assert (len(counted) > 0) == reads


@pytest.mark.parametrize(
    ("parameter", "part"),
    [
        ("head.linear.weight", "head"),
        ("layers.11.attention.linear_qkv.weight", "layers.attention"),
        ("layers.0.mlp.experts.3.linear_fc1.weight", "layers.mlp"),
        ("mid_block.attentions.0.norm.bias", "mid_block"),
        ("layers.2.scale", "layers"),
        ("table", "table"),
    ],
)
def test_parameters_are_assigned_to_parts(parameter: str, part: str) -> None:
    assert part_of(parameter) == part


def test_peak_memory_is_that_of_the_fullest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "peak_memory", lambda: {"allocated": 5 << 40, "reserved": 7})
    peaks = rates.memory_peaks(torch.device("cpu"))
    assert peaks == {"peak_memory_allocated_bytes": 5 << 40, "peak_memory_reserved_bytes": 7}


def test_reports_saves_and_validation_call_no_group_of_one_rank(
    tmp_path, monkeypatch: pytest.MonkeyPatch, one_rank_world: ProcessGroups
) -> None:
    """NCCL allocates about 400 MB at the first call of each group, also of one with one rank."""
    run, used = tiny_run(tmp_path, one_rank_world, *ONE_STREAM), set[Any]()
    sums = torch.zeros(2)
    run.step(sums)
    for name in ("all_reduce", "all_gather_object", "gather_object"):
        call = getattr(dist, name)

        def recorded(*args: Any, call: Any = call, group: Any = None, **options: Any) -> Any:
            used.add(group)
            return call(*args, group=group, **options)

        monkeypatch.setattr(dist, name, recorded)
    for module in ("dit.training.drops", "dit.step.device_batches"):  # one rank gathers without a call
        monkeypatch.setattr(f"{module}.gather_objects", lambda value, group=None: used.add(group) or [value])
    run.report(sums, 1.0)
    assert used == {None}, "no call was recorded, or a call of a smaller group"
    run.save()
    run.saves.finish()
    run.validate()
    run.sample()
    run.drops.report(run.state, 1, one_rank_world, run.log)
    run.close()
    assert used == {None}


def test_drops_of_earlier_attempts_are_not_reported_again(
    tmp_path, monkeypatch: pytest.MonkeyPatch, one_rank_world: ProcessGroups
) -> None:
    """The positions of the data in a checkpoint include the counts."""
    counts = SampleCounts(Counter(image=90), Counter({("damaged", "image"): 7}))
    monkeypatch.setattr(StreamGroup, "sample_counts", lambda _: counts)
    finish(tiny_run(tmp_path, one_rank_world, *ONE_STREAM))
    run = tiny_run(tmp_path, one_rank_world, *ONE_STREAM)
    run.log = Mock()
    run.drops.report(run.state, 7, one_rank_world, run.log)
    assert run.state.step == 1
    run.log.incident.assert_not_called()
    counts.dropped["damaged", "image"] += 1
    run.drops.report(run.state, 8, one_rank_world, run.log)
    run.close()
    run.log.incident.assert_called_once_with("samples_dropped", 1, samples=1, total=8, by_reason={"damaged": 8})
    run.log.message.assert_not_called()


def test_rates_count_the_time_in_which_a_report_waits_for_the_device(
    tmp_path, monkeypatch: pytest.MonkeyPatch, one_rank_world: ProcessGroups
) -> None:
    """On a GPU, the update of a logged step is queued when the host reads its numbers, and `report` waits for it."""
    seconds, update_s = [], 0.2

    def report(run: Run, loss_sums: torch.Tensor, duration: float) -> None:
        seconds.append(duration)
        time.sleep(update_s)

    monkeypatch.setattr(Run, "report", report)
    run = tiny_run(tmp_path, one_rank_world, *ONE_STREAM, "training.num_steps=4", "training.log_interval=1")
    unasked: Any = SimpleNamespace(signal_name=None, requested=False)
    train(run, SimpleNamespace(step=0), unasked)  # type: ignore[arg-type]
    run.close()
    assert len(seconds) == 4
    assert min(seconds[1:]) >= update_s


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        *(("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA B200", 2250)),
        *(
            ("NVIDIA GB200", 2500),
            ("NVIDIA GB300", 2500),
            ("NVIDIA A100-SXM4-80GB", 312),
            ("CPU", None),
            ("NVIDIA GeForce RTX 4090", None),
        ),
    ],
)
def test_mfu_is_the_share_of_the_peak_of_a_known_device(
    device: str, tflops: float | None, tmp_path, monkeypatch: pytest.MonkeyPatch, one_rank_world: ProcessGroups
) -> None:
    assert peak_flops(device) == (None if tflops is None else tflops * 1e12)
    run = tiny_run(tmp_path, one_rank_world, *ONE_STREAM)
    next(run.batches)
    monkeypatch.setattr(rates, "describe", lambda: device)
    _, values = rates.rates(run.batches.reset(), run.state.stream, one_rank_world, 1, 0.5, run.device)
    run.close()
    expected = None if tflops is None else pytest.approx(values["tflops_per_rank"] / tflops)
    assert values.get("mfu") == expected
