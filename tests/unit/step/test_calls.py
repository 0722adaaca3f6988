"""Torch calls of a step, and waits of its host: limits on counts, which do not depend on the load of the machine."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.host import wait_job
from benchmarks.step import build_parser, config_of
from benchmarks.waits import WaitCounter, count_waits, meta_device
from dit import philox
from dit.backends import device
from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.layout import to_device
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.training import pretrain
from dit.training.pretrain import Run
from energon_data.mock import MockData
from tests.support.calls import CallCounter, copies_to_host

pytestmark = pytest.mark.usefixtures("one_rank_world")


def letters(folder: Any, *words: str, data: MockData | None = None) -> Any:
    """Return the settings of `letters_dit` with AdamW (6 layers, two micro-batches of 512 tokens) on mock pictures."""
    asked = ["--factory", "letters_dit", "--shape", "1x16x16", "optimizer.algorithm=adamw", *words]
    config = config_of(build_parser().parse_args(asked), str(folder))
    return config if data is None else replace(config, data=data)


def warm(config: Any, groups: ProcessGroups) -> tuple[Run, torch.Tensor]:
    """Return a run after its first steps, with the optimizer's state and the samples of the data set."""
    dims, spec = config.check_here()
    run = Run(config, dims, spec, groups, quiet=True)
    sums = torch.zeros(len(config.objective.logged) + 1)
    for _ in range(3):
        run.step(sums)
    return run, sums


@pytest.mark.parametrize(("kind", "most"), [("dense", 2400), ("ragged", 3600)])
def test_a_step_makes_the_documented_calls(kind: str, most: int, tmp_path, one_rank_world: ProcessGroups):
    """The aten calls of an optimizer step of the six-layer model, including its data and its average."""
    config = letters(tmp_path)
    if kind == "ragged":
        config = letters(tmp_path, "training.global_batch_size=2", "training.micro_batch_size=1")
        shapes = [f"1x{height}x{width}" for height in (8, 12, 16) for width in (8, 12, 16)]
        packed = {"shapes": shapes, "max_tokens_per_pack": 512, "pack_multiple_of": 1}
        config = replace(config, data=replace(config.data, **packed))
    run, sums = warm(config, one_rank_world)
    with CallCounter() as counter:
        run.step(sums)
    run.close()
    assert len(run.batches.consumed.flops) == 8  # two micro-batches in each of four steps
    assert counter.calls <= most, counter.by_operation.most_common(12)


class Outside(Iterator[PackedBatch]):
    """Micro-batches made in advance, because making them is the work of the loader in other processes.

    Args:
        batches: those of a run.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.ready: list[PackedBatch] = []

    def __next__(self) -> PackedBatch:
        return self.ready.pop(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


def model(kind: str, layers: int) -> ModelConfig:
    sizes = {"hidden_size": 32, "num_layers": layers, "num_attention_heads": 2, "in_channels": 4, "patch_spatial": 2}
    if kind == "dit":
        return DiTConfig(**sizes, num_classes=10, class_dropout=0.1, position_embedding="rope_3d")
    return DiTCrossConfig(**sizes, context_size=16, context_dropout=0.1, qk_layernorm=True)


PACKS = {
    "dense": {"shapes": ["1x8x8"]},
    "ragged": {"shapes": ["1x8x8", "1x8x12", "1x4x4", "1x20x20"], "max_tokens_per_pack": 160, "pack_multiple_of": 4},
}


@pytest.mark.parametrize(("kind", "pack"), [("dit", "dense"), ("dit_cross", "ragged")])
def test_a_step_does_not_wait(
    kind: str, pack: str, tmp_path, one_rank_world: ProcessGroups, monkeypatch: pytest.MonkeyPatch
):
    """A step between two log lines: no row is selected by a mask, and no gradient is scattered row by row."""
    monkeypatch.setattr(philox, "ten_rounds", philox._rounds)  # as on a machine with a GPU
    read = torch.Tensor.tolist  # the counting method replaces it
    monkeypatch.setattr(device, "begin_copy_to_host", lambda values: partial(read, values))  # asynchronous on a GPU
    data = MockData(dataset_size=16, **PACKS[pack])
    batch = "1" if pack == "ragged" else "4"
    words = [f"training.{name}_batch_size={batch}" for name in ("global", "micro")]
    config = replace(letters(tmp_path, *words, data=data), model=model(kind, 2))
    run, sums = warm(config, one_rank_world)
    run.batches = Outside(run.batches)  # type: ignore[assignment]
    run.batches.ready.append(next(run.batches.batches))
    with ExitStack() as stack:
        copies, counter = stack.enter_context(copies_to_host()), stack.enter_context(CallCounter())
        run.step(sums, late=True)
    run.close()
    assert counter.waits == 0, counter.by_operation
    assert not copies
    assert not [name for name in counter.by_operation if name.startswith(("index_put", "_index_put", "nonzero"))]


def test_the_loop_adds_no_wait_to_a_step(tmp_path, one_rank_world: ProcessGroups, monkeypatch: pytest.MonkeyPatch):
    """Requests to stop are sent with the loss; separately, ranks only agree before the first step and after a save."""
    config = letters(tmp_path, "training.num_steps=4", "model.num_layers=1")
    dims, spec = config.check_here()
    run = Run(config, dims, spec, one_rank_world, quiet=True)
    agreed: list[int] = []
    monkeypatch.setattr(pretrain, "any_rank", lambda flag: agreed.append(run.state.step) or flag)
    asked = SimpleNamespace(signal_name=None, requested=False)
    record = SimpleNamespace(step=0)
    assert not pretrain.train(run, record, asked)  # type: ignore[arg-type]
    run.close()
    assert record.step == config.training.num_steps
    assert agreed == [0, record.step]


def test_a_request_to_stop_ends_the_run_after_its_step(tmp_path, one_rank_world: ProcessGroups):
    """The signal arrives in the forward pass of step 2."""
    config = letters(tmp_path, "training.num_steps=4", "model.num_layers=1")
    dims, spec = config.check_here()
    run = Run(config, dims, spec, one_rank_world, quiet=True)
    asked, record = SimpleNamespace(signal_name="SIGTERM", requested=False), SimpleNamespace(step=0)

    def interrupted(step: int) -> Any:
        asked.requested = step == 1
        return run.forward_step(step)

    run.functions = replace(run.functions, forward_step=interrupted)
    assert pretrain.train(run, record, asked)  # type: ignore[arg-type]
    run.close()
    assert record.step == 2


@pytest.mark.parametrize(
    ("recipe", "packs", "kernels", "precision"),
    [
        ("tiny_dit", "packed", "triton", "fp16"),
        pytest.param("pretrain_7b", "packed, CP 2", "triton", "bf16", marks=pytest.mark.slow),
        ("flux_12b", "packed", "eager", "bf16"),
        ("pretrain_stdit_xl", "packed, CP 2", "eager", "bf16"),
        pytest.param("tiny_ldm_unet", "dense", "eager", "bf16", marks=pytest.mark.slow),
    ],
)
def test_a_step_of_a_gpu_does_not_wait(recipe: str, packs: str, kernels: Any, precision: Any):
    """With the kernels of a GPU; the numbers of a step are read once, in the next step."""
    job = wait_job(recipe, packs, kernels)
    counted = count_waits(replace(job, training=replace(job.training, precision=precision)))
    assert not counted.waits, counted.lines
    assert counted.late_reads == 1
    assert counted.queued["load"] > 0
    assert counted.queued["backward"] == 0


def test_every_copy_and_wait_of_the_host_is_counted():
    """Each line is a copy or a wait that a change of the program could add to a step."""
    counter, host = WaitCounter(), torch.ones(3)
    weight, numbers = torch.ones(3, device="meta", requires_grad=True), list[float]()

    def difference(change: Callable[[], object]) -> tuple[int, int]:
        queued, waits = counter.result.queued.total(), counter.result.waits.total()
        change()
        return counter.result.queued.total() - queued, counter.result.waits.total() - waits

    with meta_device(counter):
        values = torch.ones(3, device="meta")
        assert difference(lambda: values * 2 + values.sum()) == (0, 0)
        assert difference(lambda: to_device(host, values.device)) == (1, 0)
        assert difference(lambda: host.to(values.device)) == (0, 1)
        assert difference(lambda: host.to(values.device, non_blocking=True)) == (0, 1)  # not page-locked
        assert difference(lambda: values.copy_(host)) == (0, 1)
        assert difference(lambda: torch.tensor([1.0], device=values.device)) == (0, 1)
        assert difference(values.cpu) == (0, 1)
        assert difference(lambda: host.clone().copy_(values)) == (0, 1)
        assert difference(lambda: float(values[0])) == (0, 1)
        assert difference(values.tolist) == (0, 1)
        reads = [device.begin_copy_to_host(values) for _ in range(2)]
        assert difference(reads[1]) == (0, 1)
        assert difference(reads[0]) == (0, 0)  # finished earlier
        (weight * values).sum().backward()
        assert counter.result.waits["backward"] == 0
        weight.register_hook(lambda grad: numbers.append(float(grad[0])))
        (weight * values).sum().backward()
    assert counter.result.waits["backward"] == 1
    assert any(line.startswith("backward: tests/unit/step/test_calls.py:") for line in counter.result.lines)
