"""The same run on other layouts has the same losses, and checkpoints move between layouts without changing a bit."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.integration import actions
from tests.integration.runs import (
    SLOTS,
    SMALL_PACKS,
    assert_same_bits,
    checkpoint,
    letters,
    loss_values,
    mock,
    outcome,
    read_tensors,
    scalars,
    training,
)
from tests.support import faults
from tests.support.attempts import prepare_media
from tests.support.ranks import Job, call, run_jobs

pytestmark = pytest.mark.slow

ROUNDING = 1e-5  # relative, fp32: sums in another order
DDP = {"parallel__data_parallel": "ddp"}
TP = {"parallel__tensor_model_parallel_size": 2}
PP = {"parallel__pipeline_model_parallel_size": 2}
TP_SP = {**TP, "parallel__sequence_parallel": True}
FSDP = {"parallel__data_parallel": "fsdp"}
# One run that stops after each layout and resumes from its folder on the next one: (ranks, settings).
WAY = {
    "tp2sp": (2, TP_SP),
    "one": (1, DDP),
    "distributed_optimizer2": (2, {}),
    "ddp2": (2, DDP),
    "pp2": (2, PP),
    "fsdp2": (2, FSDP),
    "tp2dp2": (4, TP),
    "tp2pp2": (4, {**TP, **PP, "checkpoint__async_save": True}),
    "one_distributed_optimizer": (1, {"checkpoint__async_save": True}),
}
DRAWN = ("tp2sp", "distributed_optimizer2", "fsdp2", "pp2")
PART = 2  # steps on each layout
NUM_STEPS = PART * len(WAY)
GRIDS = {"training__sample_interval": 1, "sampling__num_steps": 2, "sampling__raw_weights": True}
STOPS = {name: PART * (i + 1) for i, name in enumerate(WAY)}

CP = {"parallel__context_parallel_size": 2}
# The same with packs of pictures and clips of several sizes from two worker processes. A step has four packs, so
# that up to four replicas can share the two streams.
PACKED_WAY = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp4": (4, {}),
    "cp2": (2, {**CP, "parallel__context_split": "load_balanced"}),
    "tp2sp": (2, TP_SP),
    "cp2tp2sp": (4, {**CP, **TP_SP}),
    "fsdp2": (2, FSDP),
    "pp2": (2, PP),
    "one_again": (1, {}),
}
PACKED_STOPS = {name: PART * i for i, name in enumerate(PACKED_WAY, 1)}
PACKED: dict[str, Any] = {
    **SMALL_PACKS,
    "data__validation_split": "train",
    "data__validation_samples": 13,
    "model__in_channels": 3,
    "model__num_layers": 2,
    "model__patch_spatial": 4,
    "model__num_classes": "null",
    "model__context_size": "null",
    "training__num_steps": PART * len(PACKED_WAY),
    "training__global_batch_size": 4,
    "training__validation_interval": PART,
    "checkpoint__interval": PART,
    "checkpoint__keep_last": len(PACKED_WAY),
    "logging__tensorboard": False,
}


tensors = cache(read_tensors)


@pytest.fixture(scope="module")
def runs(letters_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank, and a run that moves through all layouts."""
    folder = tmp_path_factory.mktemp("layouts")
    shared = {"training__num_steps": NUM_STEPS, "checkpoint__interval": PART, "checkpoint__keep_last": NUM_STEPS}
    shared |= {"training__ema_decay": 0.9}
    jobs = {"one": call(actions.train, *letters(letters_data, folder / "one", **shared, **GRIDS))}
    for name, (ranks, settings) in WAY.items():
        stop = STOPS[name]
        settings = {**shared, **settings, **(GRIDS if name in DRAWN else {}), "training__stop_at_step": stop}
        arguments = letters(letters_data, folder / "moving", **settings)
        fault = partial(faults.resaved, folder / f"loaded_{stop - PART}") if stop > PART else None
        jobs[f"moving {name}"] = call(actions.train, *arguments, ranks=ranks, fault=fault)
    results = run_jobs(folder / "world", jobs)
    for name, job in jobs.items():
        ended = results[name] if job.ranks > 1 else [results[name]]
        expected = 75 if name.startswith("moving") and name != f"moving {list(WAY)[-1]}" else 0
        assert {e.code for e in ended} == {expected}, (name, ended)
    return folder


def test_losses_equal_those_of_one_rank(runs: Path) -> None:
    """The layout changes every two steps; the global batch stays the same."""
    losses = loss_values(runs / "moving")
    assert len(losses) == NUM_STEPS
    assert losses == pytest.approx(loss_values(runs / "one"), rel=ROUNDING)
    assert outcome(runs / "moving")["code"] == 0


@pytest.mark.parametrize(("before", "after"), list(zip(WAY, list(WAY)[1:])))
def test_a_checkpoint_moves_between_layouts_bitwise_unchanged(runs: Path, before: str, after: str) -> None:
    """The second layout loads the exact weights, average and Adam's state that the first one saved."""
    step = STOPS[before]
    folders = checkpoint(runs / "moving", step), runs / f"loaded_{step}"
    saved, loaded = map(tensors, folders)
    assert {key.partition(".")[0] for key in saved} == set(SLOTS)
    assert_same_bits(loaded, saved)
    scalars = [json.loads((folder / "state.json").read_text())["scalars"] for folder in folders]
    assert scalars == [{"adam_step": step}] * 2


@pytest.mark.parametrize("name", WAY)
def test_checkpoints_of_all_layouts_hold_the_same_model(runs: Path, name: str) -> None:
    """Global names, shapes and values do not depend on the layout that wrote them."""
    assert_same_model(runs, STOPS[name])


def assert_same_model(folder: Path, step: int) -> None:
    """Compare checkpoints of the moving run with those of the run on one rank."""
    found, expected = (tensors(checkpoint(folder / run, step)) for run in ("moving", "one"))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].shape == tensor.shape
        error = (found[key] - tensor).norm()
        # If a weight's gradient is rounding noise, so is the direction of its Adam update.
        assert error <= 1e-3 * tensor.norm() + 1e-6, f"{key}: {error / tensor.norm():.1e}"


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_grids_of_both_weights_are_the_same_on_every_layout(runs: Path, name: str, weights: str) -> None:
    """Grids are equal within rounding, 1 of 255; those of the other kind of weights differ by more."""
    step = STOPS[name] - 1  # the run stops at the last step of a layout
    grids = [grid(runs / run, step, weights) for run in ("moving", "one")]
    assert grids[0].std() > 10
    assert np.abs(grids[0] - grids[1]).max() <= 1
    assert np.abs(grids[0] - grid(runs / "moving", step, "raw" if weights == "ema" else "ema")).max() > 1


def grid(run: Path, step: int, weights: str) -> np.ndarray:
    with Image.open(run / "samples" / f"step_{step:07d}" / f"{weights}.png") as picture:
        return np.asarray(picture, dtype=np.int16)


@pytest.fixture(scope="module")
def packed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank, and one that moves through layouts with other padding and other numbers of replicas."""
    folder = prepare_media(tmp_path_factory.mktemp("packed"))
    blend = f"[{{path: {folder / 'pictures'}, weight: 2}}, {{path: {folder / 'films'}, weight: 1}}]"

    def job(name: str, ranks: int, **settings: Any) -> Job:
        fault = partial(faults.samples_noted, folder / f"{name}_samples.jsonl")
        return training("tiny_dit", folder / name, ranks, fault, **{**PACKED, "data__blend": blend, **settings})

    jobs, last = {"one": job("one", 1)}, list(PACKED_WAY)[-1]
    for name, (ranks, settings) in PACKED_WAY.items():
        stop = {"training__stop_at_step": PACKED_STOPS[name]} if name != last else {}
        jobs[f"moving {name}"] = job("moving", ranks, **settings, **stop)
    results = run_jobs(folder / "world", jobs)
    for name, one_job in jobs.items():
        ended = results[name] if one_job.ranks > 1 else [results[name]]
        stops = "stop_at_step" in " ".join(one_job.arguments["arguments"])
        assert {e.code for e in ended} == {75 if stops else 0}, name
    return folder


def test_packs_of_several_sizes_are_the_same_on_every_layout(packed_runs: Path) -> None:
    """Losses and samples of every step, and the held-out loss on 13 samples, which no number of ranks divides."""
    one, moving = packed_runs / "one", packed_runs / "moving"
    assert samples_by_step(packed_runs / "moving_samples.jsonl") == samples_by_step(packed_runs / "one_samples.jsonl")
    assert loss_values(moving) == pytest.approx(loss_values(one), rel=ROUNDING)
    assert scalars(moving, "consumed_samples") == scalars(one, "consumed_samples")
    held_out = scalars(one, "held_out/loss")
    assert len(held_out) == len(PACKED_WAY)
    assert scalars(moving, "held_out/loss") == pytest.approx(held_out, rel=ROUNDING)


def samples_by_step(file: Path) -> dict[int, set[str]]:
    """Return the sample keys of each step on all ranks."""
    samples = {step: set[str]() for step in range(1, PART * len(PACKED_WAY) + 1)}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        samples[record["step"]] |= set(record["keys"])
    assert all(samples.values())
    return samples


@pytest.mark.parametrize("name", PACKED_WAY)
def test_packs_of_several_sizes_train_the_same_model_on_every_layout(packed_runs: Path, name: str) -> None:
    """After the steps on this layout, which continued from the previous layout's checkpoint."""
    assert_same_model(packed_runs, PACKED_STOPS[name])


def test_a_data_source_whose_state_follows_the_ranks_is_refused(tmp_path: Path) -> None:
    """With another number of ranks, such a source would repeat or lose samples without an error."""
    jobs = {}
    for kind in ("keyed", "unkeyed"):
        fault = partial(faults.data_state_by_rank, has_streams=kind == "keyed")
        settings = {"data__num_streams": 4, "training__micro_batch_size": 2}
        for name, ranks, stop in (("two", 2, 1), ("two again", 2, 2), ("four", 4, 3), ("one", 1, 3)):
            words = mock(tmp_path / kind, training__stop_at_step=stop, **settings)
            jobs[kind, name] = call(actions.train, *words, ranks=ranks, fault=fault)
    results = run_jobs(tmp_path / "world", jobs)
    ended = {name: result if jobs[name].ranks > 1 else [result] for name, result in results.items()}
    for kind, code in (("keyed", 3), ("unkeyed", 2)):
        codes = {name: {e.code for e in ended[kind, name]} for name in ("two", "two again", "four", "one")}
        assert codes == {"two": {75}, "two again": {75}, "four": {code}, "one": {code}}
    assert "saved the streams [0, 1] and resumes with [0, 1, 2, 3]" in ended["keyed", "four"][0].err
    assert "saved the streams [0, 1] and resumes with [0]" in ended["keyed", "one"][0].err
    for name, ranks in (("four", 4), ("one", 1)):
        assert f"on 2 data-parallel replica(s), and this run has {ranks}" in ended["unkeyed", name][0].err
