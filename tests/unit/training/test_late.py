"""Runs that read the results of most steps one step late equal, to the bit, runs that read all at once."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.errors import CheckpointError, ConfigError, NotFiniteError
from dit.monitoring.sinks import read_records
from dit.optimizer.master_weights import SLOTS, get_step_count
from dit.training import pretrain
from dit.training.late import may_be_late
from dit.training.pretrain import Run
from tests.parallel.optimizer_worker import power_average
from tests.support.tiny_runs import tiny_config, tiny_run

STEPS, SAVED, LOGGED, BAD = 20, 6, 11, 14
WORDS = (
    *(f"training.num_steps={STEPS}", f"training.log_interval={LOGGED}", "model.num_layers=1"),
    *(f"checkpoint.interval={SAVED}", "checkpoint.async_save=False", "training.global_batch_size=2"),
    *("training.micro_batch_size=1", "training.ema_decay=0.9", "data.num_streams=1", "logging.tensorboard=False"),
)
DENSE = {"shapes": ["1x8x8"]}
PACKS = {"shapes": ["1x8x8", "1x8x12", "1x4x4", "1x12x12"], "max_tokens_per_pack": 80, "pack_multiple_of": 4}
TIMES = ("per_s", "_s_", "time", "wait_share", "late_micro", "mfu", "tflops", "slowest", "peak_memory", "path")


class Scaled(Iterator[PackedBatch]):
    """A stream of packs; the latents of both packs of some steps are multiplied by a factor.

    The first ten steps are read at once, until all parameters have had a gradient.

    Args:
        factors: factor by number of the step.
    """

    def __init__(self, stream: Any, factors: dict[int, float]) -> None:
        self.stream, self.factors, self.count = stream, factors, 0

    def __next__(self) -> PackedBatch:
        pack, step = next(self.stream), self.count // 2 + 1
        self.count += 1
        return replace(pack, latents_TC=pack.latents_TC * self.factors.get(step, 1.0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Trainer:
    """Trains a tiny model on each call, in a new folder or again in the last one."""

    def __init__(self, folder: Path, groups: ProcessGroups, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.groups, self.patch = folder, groups, patch
        self.late: list[int] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.calls = 0

    def __call__(
        self,
        *words: str,
        late: bool,
        data: Any = PACKS,
        fused: bool = False,
        factors: Any = None,
        signal_in: int = 0,
        again: bool = False,
    ) -> dict[str, Any]:
        """Train; return everything that a step changes.

        `self.late` lists the steps that were read late, and `self.weights` has the weights before each step.
        """
        self.calls += not again
        config = tiny_config(self.folder / str(self.calls), *WORDS, *words)
        config = replace(config, data=replace(config.data, **data))
        run = Run(config, *config.check_here(), self.groups)
        asked = SimpleNamespace(signal_name="SIGTERM", requested=False)
        state, record = run.state, SimpleNamespace(step=0)
        if fused:
            state.update.averages = True  # as with the fused kernel
        run.batches._stream = Scaled(run.batches._stream, factors or {})
        self.late, self.weights, step_late = [], [], pretrain.train_step

        def train_step(*args: Any, late: bool) -> Any:
            self.weights.append({s.name: s.main.detach().clone() for s in state.shards})
            if late:
                self.late.append(state.step + 1)
            asked.requested = asked.requested or state.step + 1 == signal_in
            return step_late(*args, late=late)

        error = None
        with self.patch.context() as patch:
            patch.setattr(pretrain, "train_step", train_step)
            if not late:
                patch.setattr(pretrain, "may_be_late", lambda *_: False)
            try:
                stopped: Any = pretrain.train(run, record, asked)  # type: ignore[arg-type]
            except NotFiniteError as raised:
                stopped, error = None, str(raised)
        run.close()
        tensors = {f"{s.name} {slot}": s.slot(slot).clone() for s in state.shards for slot in SLOTS}
        tensors |= {s.name: s.main.detach().clone() for s in state.shards}
        for slot, values in state.ema.by_slot.items():
            tensors |= {f"{s.name} {slot}": value.clone() for s, value in zip(state.shards, values)}
        return {
            "tensors": tensors,
            "counts": (state.step, record.step, get_step_count(state.optimizer), state.consumed_samples, stopped),
            "guard": run.bad_steps.guard.state_dict(),
            "error": error,
            "scale": state.loss_scale and state.loss_scale.scalars(),
            "records": [without_times(r) for r in read_records(Path(config.training.run_dir) / "metrics.jsonl")],
            "saved": sorted(path.name for path in (Path(config.training.run_dir) / "checkpoints").glob("iter_*")),
        }


def without_times(value: Any) -> Any:
    """Return a record without measured times and memory."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not any(word in k for word in TIMES)}
    return value


@pytest.fixture
def trainer(tmp_path: Path, one_rank_world: ProcessGroups, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    return Trainer(tmp_path, one_rank_world, monkeypatch)


def assert_equal(late: dict[str, Any], early: dict[str, Any]) -> None:
    for name, values in early["tensors"].items():
        assert torch.equal(late["tensors"][name], values), name
    assert {k: v for k, v in late.items() if k != "tensors"} == {k: v for k, v in early.items() if k != "tensors"}


SKIP = "training.on_bad_numbers=skip"
LARGE = 1e4
"""Factor of latents whose fp16 gradients overflow, although the loss is finite."""
FP16 = ["training.precision=fp16", "training.initial_loss_scale=256", "training.loss_scale_window=3"]
CASES: dict[str, Any] = {
    "dense": (["training.num_steps=24"], {"data": DENSE}),  # some parameters have no gradient before step 20
    "bf16": (["training.precision=bf16", "parallel.data_parallel=distributed_optimizer"], {"fused": True}),
    "ddp, no clipping": (["parallel.data_parallel=ddp", "optimizer.clip_grad=0"], {}),
    "skip": ([SKIP], {"factors": {BAD: float("nan"), BAD + 1: float("inf"), 3 * SAVED - 1: float("nan")}}),
    "skip, offloaded": ([SKIP, "optimizer.offload=True"], {"factors": {BAD: float("nan"), BAD + 1: float("nan")}}),
    "spike": ([SKIP, "training.spike_threshold=30"], {"factors": {19: 1e4}, "fused": True}),
    "fp16, fused": (FP16, {"factors": {BAD: LARGE, BAD + 1: LARGE, 3 * SAVED - 1: LARGE}, "fused": True}),
    "fp16, skip": ([*FP16, SKIP], {"factors": {BAD: float("nan"), BAD + 1: LARGE}}),
    "fp16, constant scale": (["training.precision=fp16", "training.loss_scale=4096"], {"factors": {BAD: LARGE}}),
    "stop": ([], {"factors": {BAD: float("nan")}}),
    "too many": ([SKIP, "training.max_bad_steps=1"], {"factors": {BAD: float("nan"), BAD + 2: float("nan")}}),
    "stop at a step": ([f"training.stop_at_step={BAD}"], {}),
}


FURTHER = ("bf16", "ddp, no clipping", "skip, offloaded", "fp16, skip", "fp16, constant scale", "stop at a step")
"""Cases whose kinds of steps another case has."""


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.long] * (c in FURTHER)) for c in CASES])
def test_late_numbers_change_nothing(trainer: Trainer, case: str) -> None:
    words, arguments = CASES[case]
    early = trainer(*words, late=False, **arguments)
    assert not trainer.late
    late = trainer(*words, late=True, **arguments)
    assert trainer.late
    assert BAD in trainer.late or case in ("dense", "stop at a step")
    assert not {1, SAVED, LOGGED, STEPS} & set(trainer.late)
    assert_equal(late, early)
    if case.startswith("fp16"):
        assert late["scale"]["overflowed_steps"] == sum(factor > 1 for factor in arguments["factors"].values())
    elif "factors" in arguments:
        assert [r for r in late["records"] if r["kind"] == "incident"]
    if case == "stop":
        assert late["counts"][:2] == (BAD - 1, BAD - 1)


@pytest.mark.parametrize(("late", "fused"), [(True, False), (False, True)])
def test_a_power_average_counts_the_steps_without_an_update(trainer: Trainer, late: bool, fused: bool) -> None:
    """Its profile over the steps is the power function, as in reconstruction; an omitted update repeats the weights."""
    words = SKIP, "training.ema_sigma_rel=[0.2]", "training.max_bad_steps=3"
    factors = dict.fromkeys((1, BAD, BAD + 1), float("nan"))
    done = trainer(*words, late=late, fused=fused, factors=factors)
    tensors, (step, _, updates, *_) = done["tensors"], done["counts"]
    assert (step, updates) == (STEPS, STEPS - len(factors))
    weights = [*trainer.weights[1:], {name: tensors[name] for name in trainer.weights[0]}]
    for name, expected in power_average(weights, 0.2).items():
        torch.testing.assert_close(tensors[f"{name} ema_power_0.2"], expected, rtol=1e-5, atol=1e-6)


def test_a_request_to_stop_ends_the_run_one_step_later(trainer: Trainer, capsys: Any) -> None:
    """The state equals that of a run which ends at this step. The console names the reason."""
    late = trainer(late=True, signal_in=BAD)
    assert f"step {BAD + 1}: stops for SIGTERM\n" in capsys.readouterr().out
    early = trainer(f"training.stop_at_step={BAD + 1}", late=False)
    assert late["counts"][0] == BAD + 1
    assert f"iter_{BAD + 1:07d}" in late["saved"]
    incidents = [(r["incident"], r["step"]) for r in late["records"] if r["kind"] == "incident"]
    assert incidents == [("signal", BAD + 1)]
    late["records"] = [r for r in late["records"] if r["kind"] != "incident"]
    assert_equal(late, early)


def test_a_time_limit_that_is_over_is_refused_before_the_first_step(trainer: Trainer, monkeypatch: Any) -> None:
    """A run whose steps are done ends as usual."""
    trainer("training.num_steps=2", late=True)
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1000")
    trainer("training.num_steps=2", "training.time_limit=04:00:00", late=True, again=True)
    with pytest.raises(ConfigError, match=r"04:00:00 of the job that began .* ago \(SLURM_JOB_START_TIME\) is over"):
        trainer("training.time_limit=04:00:00", late=True)


def test_a_run_without_its_checkpoints_is_refused_or_warns(trainer: Trainer, caplog: Any, tmp_path: Path) -> None:
    """A link to a disk that is not mounted is refused; an empty folder may be intended."""
    words = "training.num_steps=2", "training.log_interval=1", "schedule.warmup_steps=0"
    warning = "metrics.jsonl records step 2, but the run has no checkpoint and starts at step 0"
    trainer(*words, late=True)
    shutil.rmtree(tmp_path / "1" / "checkpoints")
    for resume, count in (("never", 0), ("auto", 1)):
        assert caplog.text.count(warning) == 0
        assert trainer(*words, f"checkpoint.resume={resume}", late=True, again=True)["counts"][0] == 2
        assert caplog.text.count(warning) == count
        shutil.rmtree(tmp_path / "1" / "checkpoints")
    (tmp_path / "1" / "checkpoints").symlink_to("/nowhere/scratch")
    with pytest.raises(CheckpointError, match=r"checkpoints links to /nowhere/scratch, which does not exist; mount"):
        trainer(*words, late=True, again=True)


def test_a_run_that_starts_at_its_last_requested_step_ends_at_once(trainer: Trainer) -> None:
    """A requeued run does not train past `stop_at_step`; code 75 would requeue it forever."""
    for taken, stopped in ((2, True), (0, False)):
        done = trainer("training.stop_at_step=2", late=True, again=True)
        step, record_step, *_, stops_early = done["counts"]
        assert (step, record_step, stops_early) == (2, taken, stopped)


@pytest.mark.parametrize(
    ("words", "signal_in", "stopped"),
    [
        (["training.stop_at_step=2"], 0, False),
        (["training.stop_at_step=2", "training.num_steps=3"], 0, True),
        ([], 2, True),
    ],
    ids=["the last step is requested", "an earlier step is requested", "a signal in the last step"],
)
def test_the_next_start_validates_where_a_run_stopped(
    trainer: Trainer, words: list[str], signal_in: int, stopped: bool
) -> None:
    """A request of the last step is no early stop."""
    due = ["training.validation_interval=2", "training.sample_interval=2", "sampling.num_steps=1"]
    words = ["training.num_steps=2", "schedule.warmup_steps=0", "data.validation_samples=2", *due, *words]
    for signal, stops in ((signal_in, stopped), (0, False)):
        done = trainer(*words, late=True, signal_in=signal, again=True)
        assert (done["counts"][0], done["counts"][-1]) == (2, stops)
        reported = [r["kind"] for r in done["records"] if r["kind"] == "image" or "held_out/loss" in r]
        assert reported == ([] if stops else ["scalars", "image"])


def test_a_resumed_run_continues_to_count_skipped_updates(trainer: Trainer) -> None:
    words = SKIP, "training.num_steps=7", "training.log_interval=1", "schedule.warmup_steps=0"
    for last_step, factors, skipped in ((4, {3: float("nan")}, [1, 1]), (6, {2: float("nan")}, [1, 1, 1, 2])):
        done = trainer(*words, f"training.stop_at_step={last_step}", late=True, factors=factors, again=True)
        assert [r["skipped_updates"] for r in done["records"] if "skipped_updates" in r] == skipped


def test_a_bad_last_step_is_repeated_with_other_data(trainer: Trainer) -> None:
    """After a rewind, the run stops at `stop_at_step` and not after the next step."""
    words = "training.on_bad_numbers=rewind", "training.stop_at_step=2", "checkpoint.interval=1"
    done = trainer(*words, late=True, factors={2: float("nan")})
    assert done["counts"][0] == 2
    assert [r["incident"] for r in done["records"] if r["kind"] == "incident"] == ["not_finite", "rewind"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["training.on_bad_numbers=rewind"],
        ["training.ema_offload=True"],
        ["training.log_interval=1"],
        ["training.validation_interval=1", "data.validation_samples=2"],
    ],
    ids=" ".join,
)
def test_some_steps_are_read_at_once(tmp_path: Path, one_rank_world: ProcessGroups, words: list[str]) -> None:
    run = tiny_run(tmp_path, one_rank_world, *WORDS, *words)
    run.close()
    late = {step for step in range(1, STEPS + 1) if may_be_late(run.config, run.state, step)}
    assert late == (set() if words else {*range(1, STEPS)} - {SAVED, LOGGED, 2 * SAVED, 3 * SAVED})
