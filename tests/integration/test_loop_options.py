"""Options of the training loop, tested with the files of small runs: averages, validation, hooks, resuming."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import width_transfer
from dit.monitoring.sinks import read_records
from dit.optimizer.ema import exponent_of
from tests.integration import actions
from tests.integration.runs import assert_same_bits, checkpoint, checkpoints, losses, mock, read_tensors, scalars
from tests.support import faults
from tests.support.ranks import Job, call, run_jobs
from tests.unit.launch.pages import shown_files

pytestmark = pytest.mark.slow

NUM_STEPS, DECAY, START = 7, 0.75, 1
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}  # fp32: one multiplication and one addition
LOOP = {"training__ema_decay": DECAY, "training__ema_start_step": START}
WIDTHS = [
    *("--factory", "tiny_dit_cross", "--widths", "32", "64", "--rates", "1e-2", "1e30"),
    *("--batch", "1", "--steps", "8", "--warmup", "2"),
]


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    """Runs on synthetic data in one start of the ranks; each saves a checkpoint at every step."""
    jobs: dict[str, Job] = {}

    def add(name: str, at: str = "", ranks: int = 1, fault: Any = None, **settings: Any) -> None:
        usual = {"training__num_steps": NUM_STEPS, "training__log_interval": 1, "schedule__warmup_steps": 0}
        usual |= {"checkpoint__interval": 1, "checkpoint__keep_last": 20, "training__validation_interval": 3}
        arguments = mock(folder / (at or name), **{**usual, **settings})
        jobs[name] = call(actions.train, *arguments, ranks=ranks, fault=fault)

    hooks = {"training__hooks": "['tests.support.hooks.Recorder']"}
    add("options", fault=partial(faults.hooked, folder / "hooks.jsonl"), **LOOP, **hooks)
    add("fsdp", ranks=2, **LOOP, parallel__data_parallel="fsdp")
    add("powers", ranks=2, **LOOP, training__ema_sigma_rel=[0.1, 0.2])
    new_length = ["--checkpoint", folder / "powers", "--sigma-rel", 0.15, "--out", folder / "new length"]
    jobs["new length"] = call(actions.average, *new_length)
    pairs = {"training__micro_batch_size": 2, "training__num_steps": 3}
    add("contrast", objective="contrastive_flow_matching", **pairs)
    add("no average", training__ema_decay=None)
    add("stopped", **LOOP, training__stop_at_step=4)
    add("goes on", at="stopped", **LOOP, training__ema_offload=True)
    half = {"training__precision": "bf16", "training__num_steps": 8, "training__log_interval": 3}
    half["checkpoint__interval"] = 4
    add("bf16", **half)
    add("bf16 stopped", **half, training__stop_at_step=4)
    add("bf16 goes on", at="bf16 stopped", **half)
    named = checkpoint(folder / "options", 4)
    add("named", **LOOP, checkpoint__resume_from=named)
    add("named again", at="named", **LOOP, checkpoint__resume_from=named, training__num_steps=NUM_STEPS + 1)
    add("nowhere", checkpoint__resume_from=folder / "none")
    add("two starts", checkpoint__resume_from=named, checkpoint__start_from=named)
    add("other", **{**LOOP, "training__ema_start_step": 2}, checkpoint__resume_from=named)
    add("not trusted", **hooks)
    for name, text in shown_files(Path("docs/runs.md")).items():
        (folder / name).write_text(text)
    ours = partial(faults.own_package, folder, "my_hooks")
    add("page", fault=ours, training__hooks="['my_hooks.Print']", training__num_steps=3)
    jobs["widths"] = Job(actions.command, {"main": width_transfer.main, "arguments": WIDTHS})
    return run_jobs(folder / "world", jobs)


def state(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return read_tensors(checkpoint(run_dir, step))


def test_the_average_follows_its_formula_after_its_start(done: dict[str, Any], folder: Path) -> None:
    """Until its start, the average equals the weights. Every step's checkpoint is compared."""
    assert done["options"].code == 0, done["options"].err
    before = state(folder / "options", START)
    for name in [name for name in before if name.startswith("weight.")]:
        assert torch.equal(before[name], before[name.replace("weight.", "ema.", 1)])
    for step in range(START + 1, NUM_STEPS + 1):
        now = state(folder / "options", step)
        for name in [name for name in now if name.startswith("ema.")]:
            expected = DECAY * before[name] + (1 - DECAY) * now[name.replace("ema.", "weight.", 1)]
            torch.testing.assert_close(now[name], expected, **ROUNDING)
        before = now


def test_averages_of_a_run_combine_to_one_of_another_length(done: dict[str, Any], folder: Path) -> None:
    """The result is the sum of the weights after every step, weighted by integrals of the power function."""
    assert [rank.code for rank in done["powers"]] == [0, 0]
    assert done["new length"].code == 0, done["new length"].err
    assert "combined 14 averages of steps 1 to 7 to sigma_rel=0.15 at step 7" in done["new length"].err
    n, steps = exponent_of(0.15), range(1, NUM_STEPS + 1)
    states = [state(folder / "powers", step) for step in steps]
    combined = read_tensors(checkpoint(folder / "new length", 0))
    for name, value in combined.items():
        shares = [(s / NUM_STEPS) ** n - ((s - 1) / NUM_STEPS) ** n for s in steps]
        expected = sum(share * weights[name] for share, weights in zip(shares, states))
        moved = float((states[-1][name] - states[0][name]).abs().max())
        torch.testing.assert_close(value, expected, rtol=0, atol=0.02 * moved + 1e-7)


def test_only_training_has_negatives(done: dict[str, Any], folder: Path) -> None:
    assert done["contrast"].code == 0, done["contrast"].err
    trained = scalars(folder / "contrast", "loss_contrast")
    assert sorted(trained) == [1, 2, 3]
    assert max(trained.values()) < -0.01
    assert scalars(folder / "contrast", "held_out/loss_contrast") == {3: 0.0}


def test_a_stopped_run_resumes_bitwise_equal(done: dict[str, Any], folder: Path) -> None:
    """The resumed run keeps the average in host memory, which changes no number."""
    assert (done["stopped"].code, done["goes on"].code) == (75, 0), done["goes on"].err
    assert_same_bits(state(folder / "stopped", NUM_STEPS), state(folder / "options", NUM_STEPS))
    assert losses(folder / "stopped") == losses(folder / "options")


def test_bf16_resumes_bitwise_equal_with_its_fp32_masters(done: dict[str, Any], folder: Path) -> None:
    assert [done[name].code for name in ("bf16", "bf16 stopped", "bf16 goes on")] == [0, 75, 0]
    end = state(folder / "bf16", 8)
    assert_same_bits(state(folder / "bf16 stopped", 8), end)
    assert losses(folder / "bf16 stopped") == losses(folder / "bf16")
    for name, tensor in end.items():
        # Weights that are updated in bf16 would still be bf16 numbers after eight steps.
        if name.startswith(("weight.", "ema.")) and tensor.numel() > 1000:
            assert not torch.equal(tensor, tensor.bfloat16().float()), name


def test_counts_between_two_log_lines_survive_a_stop(done: dict[str, Any], folder: Path) -> None:
    """There is a log line every three steps and before each checkpoint."""
    counts = scalars(folder / "bf16", "consumed_samples")
    assert counts == {step: counts[3] // 3 * step for step in (3, 4, 6, 8)}
    assert scalars(folder / "bf16 stopped", "consumed_samples") == counts


def test_validation_and_hooks_change_no_number(done: dict[str, Any], folder: Path) -> None:
    """Validation of the average, and hooks; the held-out loss is the average's if there is an average."""
    assert done["no average"].code == 0, done["no average"].err
    assert losses(folder / "options") == losses(folder / "no average")
    raw = scalars(folder / "no average", "held_out/loss")
    assert sorted(raw) == [3, 6]
    assert all(raw[step] != loss for step, loss in scalars(folder / "options", "held_out/loss").items())


def test_two_ranks_with_fsdp_give_the_same_numbers(done: dict[str, Any], folder: Path) -> None:
    assert [ended.code for ended in done["fsdp"]] == [0, 0], done["fsdp"][0].err
    for name in ("loss", "held_out/loss"):
        assert scalars(folder / "fsdp", name) == pytest.approx(scalars(folder / "options", name), rel=1e-5), name


def test_hooks_see_every_step_and_validation(done: dict[str, Any], folder: Path) -> None:
    """The values equal those of `metrics.jsonl`, in the order of the steps."""
    calls = [json.loads(line) for line in (folder / "hooks.jsonl").read_text().splitlines()]
    assert [call.get("step", call.get("validated")) for call in calls] == [1, 2, 3, 3, 4, 5, 6, 6, 7]
    norms = {call["step"]: call["grad_norm"] for call in calls if "step" in call}
    assert norms == scalars(folder / "options", "grad_norm")
    held_out = {call["validated"]: call["losses"]["loss"] for call in calls if "validated" in call}
    assert held_out == scalars(folder / "options", "held_out/loss")
    assert done["not trusted"].code == 2
    assert "DIT_PACKAGES=tests" in done["not trusted"].err


def test_the_hook_of_the_page_prints(done: dict[str, Any]) -> None:
    assert done["page"].code == 0, done["page"].err
    lines = [line for line in done["page"].out.splitlines() if line.startswith("hook: ")]
    assert [line.partition(",")[0] for line in lines] == [f"hook: step {step}" for step in (1, 2, 3)]
    assert "gradient norm" in lines[-1]


def test_a_run_from_a_named_checkpoint_is_bitwise_equal(done: dict[str, Any], folder: Path) -> None:
    """The new run has its own folder, and loads optimizer and data position; the same command then resumes it."""
    assert (done["named"].code, done["named again"].code) == (0, 0), done["named"].err
    assert_same_bits(state(folder / "named", NUM_STEPS), state(folder / "options", NUM_STEPS))
    expected = losses(folder / "options")
    found = losses(folder / "named")
    assert sorted(found) == [5, 6, 7, 8]
    assert {step: found[step] for step in (5, 6, 7)} == {step: expected[step] for step in (5, 6, 7)}
    records = read_records(folder / "named" / "metrics.jsonl")
    attempts = {record["step"]: record["attempt"] for record in records if record["kind"] == "scalars"}
    assert (attempts[7], attempts[8]) == (1, 2)
    assert checkpoints(folder / "options")[-1] == "iter_0000007"


def test_a_checkpoint_that_cannot_be_resumed_is_refused(done: dict[str, Any]) -> None:
    """The checkpoint does not exist, has other settings, or `start_from` is set as well."""
    assert [done[name].code for name in ("nowhere", "two starts", "other")] == [5, 2, 2]
    assert "checkpoint.resume_from" in done["nowhere"].err
    assert "remove one of the two" in done["two starts"].err
    assert "training.ema_start_step: 1 -> 2" in done["other"].err


def test_widths_are_compared_with_and_without_a_base_width(done: dict[str, Any]) -> None:
    assert done["widths"].code == 0, done["widths"].err
    _, *rows = [line.strip("| ").split(" | ") for line in done["widths"].out.splitlines() if line.startswith("|")]
    assert [cells[:2] for cells in rows] == [["32", "no"], ["64", "no"], ["64", "yes"]]
    assert all(cells[3] == "inf" and cells[2].startswith("**") for cells in rows)
    assert rows[1][2] != rows[2][2]
