"""Reports of a run: TensorBoard and wandb equal `metrics.jsonl`, and benchmark records are consistent."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dit.layout import SequenceLayout
from dit.models.dit.config import DiTConfig
from dit.monitoring.flops import PackFlops
from dit.monitoring.sinks import read_records, scalars_by_step
from dit.parallel.build import count_parameters
from tests.integration import actions
from tests.integration.runs import letters, loss_values
from tests.support import faults
from tests.support.ranks import Job, call, run_jobs

pytestmark = pytest.mark.slow

ROUNDING = 1e-5  # relative, fp32: sums in another order
FP32 = 1e-6  # relative; TensorBoard has float32
MIRRORS = {"logging__tensorboard": True, "logging__wandb": True}
PAGE = {"logging__wandb_name": "the-page", "logging__wandb_group": "the-group"}


@pytest.fixture(scope="module")
def done(letters_data: Path, folder: Path) -> dict[str, Any]:
    """A run with all mirrors, one whose mirror breaks, one without mirrors, and benchmarks."""
    settings = {"training__num_steps": 6, "checkpoint__interval": 3, "sampling__num_steps": 2}
    settings |= {"training__validation_interval": 3, "training__sample_interval": 6}

    def run(name: str, fault: Any = None, **more: Any) -> Job:
        return call(actions.train, *letters(letters_data, folder / name, **settings, **more), fault=fault)

    measure = ["--factory", "tiny_dit", "--steps", 4, "--warmup", 1, "--out", folder / "lines.jsonl"]
    jobs = {
        "plain": run("plain"),
        "bounded": run("bounded", training__micro_batch_size=3),
        "mirrored": run("mirrored", **MIRRORS, **PAGE, logging__wandb_artifacts=True),
        "broken": run("broken", faults.no_wandb, **MIRRORS),
        "benchmark": call(actions.benchmark, *measure),
        "split": call(actions.benchmark, *measure, "parallel.tensor_model_parallel_size=2", ranks=2),
        "shape": call(actions.benchmark, *measure, "--shape", "1x16x8", "training.global_batch_size=16"),
    }
    found = run_jobs(folder / "world", jobs)
    found["split"] = found["split"][0]  # rank 0 reports
    assert {ended.code for ended in found.values()} == {0}, found
    return found


def test_the_micro_batch_that_fits_changes_no_loss(done: dict[str, Any], folder: Path) -> None:
    """A global batch of 8 with micro-batches of at most 3 uses four of 2, not two of 4; `env.json` records this."""
    sizes = {
        name: json.loads((folder / name / "env.json").read_text())[-1]["micro_batch_size"]
        for name in ("plain", "bounded")
    }
    assert sizes == {"plain": 4, "bounded": 2}
    assert loss_values(folder / "bounded") == pytest.approx(loss_values(folder / "plain"), rel=ROUNDING)


def test_tensorboard_holds_every_scalar_and_picture(done: dict[str, Any], folder: Path) -> None:
    events = EventAccumulator(str(folder / "mirrored" / "events"))
    events.Reload()
    truth = scalars_by_step(read_records(folder / "mirrored" / "metrics.jsonl"))
    assert sorted(truth) == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_s", "held_out/loss", "consumed_samples"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        written = {step: values[name] for step, values in truth.items() if name in values}
        assert shown == pytest.approx(written, rel=FP32), name
    assert [event.step for event in events.Images("samples")] == [6]


def test_wandb_writes_only_to_the_run_folder(done: dict[str, Any], folder: Path) -> None:
    run_id = (folder / "mirrored" / "wandb_id").read_text().strip()
    (part,) = (folder / "mirrored" / "wandb").glob(f"offline-run-*-{run_id}")
    (record,) = part.glob("*.wandb")
    assert b"the-page" in record.read_bytes()
    assert b"the-group" in record.read_bytes()
    assert list(part.rglob("*.png"))


def test_mirrors_change_nothing_in_the_record(done: dict[str, Any], folder: Path) -> None:
    """With mirrors, without, or with one that fails at its first scalar: the same records, and losses to the bit."""
    names = ("plain", "mirrored", "broken")
    records = [read_records(folder / name / "metrics.jsonl") for name in names]
    kinds = [[(r["kind"], r["step"], sorted(r)) for r in found] for found in records]
    assert kinds[0] == kinds[1] == kinds[2]
    assert loss_values(folder / "plain") == loss_values(folder / "mirrored") == loss_values(folder / "broken")
    log = (folder / "world" / "rank_0.log").read_text()
    assert log.count("wandb stops (ConnectionError: the service is gone); training continues") == 1
    assert not (folder / "plain" / "wandb").exists()
    assert not (folder / "plain" / "events").exists()


@pytest.mark.parametrize(
    ("name", "ranks", "tokens", "samples"), [("benchmark", 1, 64, 8), ("shape", 1, 32, 16), ("split", 2, 64, 8)]
)
def test_the_parts_of_a_benchmark_sum_to_its_total(
    done: dict[str, Any], folder: Path, name: str, ranks: int, tokens: int, samples: int
) -> None:
    """Rates times time equal the independently counted tokens and operations of a step, for two shapes of data.

    Ranks that share a layer share its work; `parameters` counts the full model.
    """
    record = json.loads(done[name].out.splitlines()[-1])
    written = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    assert record in written
    sizes = {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "in_channels": 4, "num_classes": 10}
    model = DiTConfig(**sizes, context_size=32, position_embedding="sincos_3d")
    micro_batch = SequenceLayout.from_lengths([tokens] * 4)
    seconds = record["step_ms_p50"] / 1e3
    assert record["status"] == "ok"
    assert record["parameters"] == count_parameters(model)
    assert (record["steps"], record["global_batch_size"], record["tokens_per_step"]) == (4, samples, samples * tokens)
    assert record["valid_tokens_per_s_per_rank"] * seconds * ranks == pytest.approx(samples * tokens)
    assert record["padded_tokens_per_s_per_rank"] * seconds * ranks == pytest.approx(samples * tokens)
    assert record["samples_per_s"] * seconds == pytest.approx(samples)
    for convention in ("model", "hardware", "nemo"):
        counted = samples / 4 * PackFlops(model).training(micro_batch, [(1, tokens // 8, 8)] * 4, convention=convention)
        assert record[f"tflops_per_rank_{convention}"] * seconds * ranks * 1e12 == pytest.approx(counted), convention
    assert record["step_ms_p50"] <= record["step_ms_p90"]
    assert 0 < record["loss"] < 10
