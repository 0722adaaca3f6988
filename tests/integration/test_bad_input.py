"""For every kind of bad input, a run names the problem, exits with its code, and leaves nothing half-written."""

import json
import os
import pickle
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dit.monitoring.sinks import read_records
from tests.integration import actions
from tests.integration.runs import (
    assert_same_bits,
    checkpoint,
    checkpoints,
    letters,
    loss_values,
    mock,
    outcome,
    read_tensors,
    scalars,
    started,
)
from tests.support import faults
from tests.support.ranks import Job, call, run_jobs
from tests.unit.energon_data.small_data import npy, write_dataset

ROUNDING = 1e-5  # relative, fp32: two ranks sum in another order
LIMITS = [0, 100, 1_000, 4_000, 16_000, 64_000, 200_000]
"""File sizes in bytes at which writing fails: in the header, the metadata, the loader's position, and the tensors."""


class Executed:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def flip_a_bit(data: Path, copy: Path, key_number: int = 0) -> tuple[Path, str, str]:
    """Copy a data set and flip the last bit of one latent; return the copy, the shard and the sample's name."""
    shutil.copytree(data, copy)
    shard = sorted(copy.glob("train-*.tar"))[-1]
    with tarfile.open(shard) as tar:
        member = [m for m in tar.getmembers() if m.name.endswith(".latent.npy")][key_number]
    content = bytearray(shard.read_bytes())
    content[member.offset_data + member.size - 1] ^= 1
    shard.write_bytes(content)
    return copy, shard.name, member.name.removesuffix(".latent.npy")


def with_part(folder: Path, part: dict[str, bytes]) -> Path:
    """Write a data set of 32 samples, of which the ninth has an additional part."""
    latent = {"latent.npy": npy(np.zeros((1, 1, 8, 8), np.float32))}
    samples = [(f"s{i:02d}", {"label": i % 26}, latent | (part if i == 8 else {})) for i in range(32)]
    return write_dataset(folder, {"train": samples, "val": samples})


def stills_and_clips(folder: Path) -> Path:
    """Write 24 stills of 16 tokens and 12 clips of 128 tokens, with patches of 2 x 2."""
    frames = [8 if i % 3 == 0 else 1 for i in range(36)]
    samples = [
        (f"s{i:02d}", {"label": i % 26}, {"latent.npy": npy(np.zeros((1, n, 8, 8), np.float32))})
        for i, n in enumerate(frames)
    ]
    return write_dataset(folder, {"train": samples, "val": samples[1:3]})


@pytest.fixture(scope="module")
def damaged(letters_data: Path, folder: Path) -> tuple[Path, str, str]:
    return flip_a_bit(letters_data, folder / "damaged")


@pytest.fixture(scope="module")
def small_disk(folder: Path) -> Iterator[Path]:
    """Yield a disk with space for two checkpoints, or a plain folder if mounting is not allowed."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
    yield disk
    if mounted:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture(scope="module")
def ended(letters_data: Path, folder: Path, damaged: tuple[Path, str, str], small_disk: Path) -> dict[str, Any]:
    """Run with every mistake in order, in one start of the ranks."""
    marker = folder / "executed"
    pickled = with_part(folder / "pickled", {"extra.pkl": pickle.dumps(Executed(marker))})

    jobs: dict[str, Job] = {}

    def add(
        name: str, data: Path = letters_data, at: str = "", ranks: int = 1, fault: Any = None, **settings: Any
    ) -> None:
        settings = {"training__num_steps": 6, "checkpoint__interval": 2, **settings}
        arguments = letters(data, folder / (at or name), **settings)
        jobs[name] = call(actions.train, *arguments, ranks=ranks, fault=fault)

    (folder / "file").write_text("")
    add("no folder", at="file/run")
    add("missing", folder / "nowhere")
    add("impossible", parallel__tensor_model_parallel_size=2)
    add("fewer classes", model__num_classes=10)
    add("flipped", damaged[0])
    add("pickled", pickled)
    # Runs whose save fails have data workers, which inherit the process state that a failed run left.
    add("sound", training__stop_at_step=4, data__background=True)
    add("another model", at="sound", model__hidden_size=64)
    add("never", at="sound", checkpoint__resume="never")
    add("must", checkpoint__resume="must")
    nan = partial(partial, faults.not_a_number)
    add("nan", fault=nan(4, 0, folder / "nan.pt"), checkpoint__interval=1)
    add("disk", fault=partial(faults.saving_fails, 16_000, 0), at="sound", data__background=True)
    small = mock(small_disk / "run", checkpoint__interval=1, checkpoint__keep_last=9, training__num_steps=9)
    jobs["small disk"] = call(actions.train, *small)
    sweep = mock(folder / "sweep", training__num_steps=20, checkpoint__keep_last=1)
    jobs["sweep"] = call(actions.full_disk, *sweep, limits=LIMITS)
    add("budget", damaged[0], ranks=2, data__max_lost_samples=1000, training__num_steps=2)
    packs = {"data__max_tokens_per_pack": 64, "data__num_streams": 2, "data__packing_buffer_size": 12}
    one = {"training__micro_batch_size": 1, "training__global_batch_size": 2}
    add("long clips", stills_and_clips(folder / "clips"), ranks=2, **packs, **one)
    add("nan on one rank", ranks=2, fault=nan(3, 1, folder / "nan_2.pt"), checkpoint__interval=1)
    add("disk of rank 0", ranks=2, fault=partial(faults.saving_fails, 500, 0), at="sound")
    halves = {"parallel__tensor_model_parallel_size": 2}
    add("disk of rank 1", ranks=2, fault=partial(faults.saving_fails, 16_000, 1), at="sound", **halves)
    add("disk at the index", ranks=2, fault=faults.index_refused, at="sound")
    add("repaired", at="sound", fault=partial(faults.resaved, folder / "loaded"), data__background=True)
    return run_jobs(folder / "world", jobs)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("missing", 3, ["nowhere does not exist", "energon_data/README.md"]),
        ("impossible", 2, ["world size 1", "TP 2", "start 2 ranks"]),
        ("fewer classes", 2, ["has 26 classes", "model.num_classes is 10", "raise it to 26"]),
        ("pickled", 3, ["'train_s08'", "train-000000.tar", "is a pickle, which can execute code"]),
        ("another model", 2, ["of another model (model.hidden_size: ", "[64", "[32", "training.run_dir"]),
        ("never", 2, ["resume=never", "steps [2, 4]", "another training.run_dir"]),
        ("must", 5, ["resume=must", "no valid checkpoint", "resume=auto"]),
    ],
)
def test_a_mistake_is_reported_with_its_code_and_cure(
    ended: dict[str, Any], folder: Path, name: str, code: int, words: list[str]
) -> None:
    run = ended[name]
    assert run.code == code
    # Settings are printed only after the checks of settings and data folder.
    assert (run.out == "") == (name in ("missing", "impossible", "fewer classes"))
    assert run.err.startswith("error: ")
    assert "Traceback" not in run.err
    for word in words:
        assert word in run.err
    run_dir = folder / ("sound" if name in ("another model", "never") else name)
    if name not in ("another model", "never"):  # later runs used that folder
        record = outcome(run_dir)
        assert record["code"] == code
        assert words[-1] in record["error"]
        assert not (run_dir / "checkpoints").exists()


def test_a_run_folder_that_cannot_be_created_is_reported_at_once(ended: dict[str, Any], folder: Path) -> None:
    """The only output is one line, because an exit record has no folder."""
    assert ended["no folder"].code == 2
    assert ended["no folder"].out == ""
    printed = ended["no folder"].err
    assert printed.startswith(f"error: training.run_dir={folder / 'file' / 'run'} cannot be used: {folder / 'file'}")
    assert printed.count("\n") == 1


def test_nothing_in_a_shard_is_executed(ended: dict[str, Any], folder: Path) -> None:
    assert not (folder / "executed").exists()
    pickle.loads(pickle.dumps(Executed(folder / "executed")))
    assert (folder / "executed").is_dir(), "the pickle was harmless, so the test shows nothing"


def test_a_flipped_bit_ends_the_run_and_names_sample_and_shard(
    ended: dict[str, Any], folder: Path, damaged: tuple[Path, str, str]
) -> None:
    _, shard, key = damaged
    for words in (f"sample '{key}' in shard '{shard}'", "checksum", "data.max_lost_samples"):
        assert words in ended["flipped"].err
    assert ended["flipped"].code == outcome(folder / "flipped")["code"] == 3
    skipped = [json.loads(line) for line in (folder / "flipped" / "data_skipped.jsonl").read_text().splitlines()]
    assert [(entry["key"], entry["shard"]) for entry in skipped] == [(key, shard)]


def test_dropped_samples_within_the_budget_are_counted_on_every_rank(
    ended: dict[str, Any], folder: Path, damaged: tuple[Path, str, str]
) -> None:
    """The damaged shard is read by one rank and logged by the other; the data set is small and read many times."""
    _, shard, key = damaged
    assert [run.code for run in ended["budget"]] == [0, 0]
    skipped = [json.loads(line) for line in (folder / "budget" / "data_skipped.jsonl").read_text().splitlines()]
    assert {(entry["stream"], entry["key"], entry["shard"]) for entry in skipped} == {(1, key, shard)}
    assert scalars(folder / "budget", "dropped_samples")[2] == len(skipped)


def test_clips_longer_than_a_pack_are_announced_and_counted(ended: dict[str, Any], folder: Path) -> None:
    """A line before step 1 names the setting to raise; then rank 0 prints a line for each doubling over both ranks."""
    assert [run.code for run in ended["long clips"]] == [0, 0]
    log = (folder / "world" / "rank_0.log").read_text()
    assert (
        f"{folder / 'clips'}: 12 of 12 clips have more than data.max_tokens_per_pack=64 tokens (the longest 128) and "
        "are dropped; raise data.max_tokens_per_pack to 128"
    ) in log
    out, quiet = (run.out for run in ended["long clips"])
    lines = [line for line in out.splitlines() if "dropped so far" in line]
    assert lines
    assert all("too_long" in line and "no clip was used" in line for line in lines)
    counts = [int(line.split(": ")[1].split()[0].replace(",", "")) for line in lines]
    assert all(later >= 2 * former for former, later in pairwise(counts))
    assert "dropped" not in quiet
    incidents = [r["details"] for r in read_records(folder / "long clips" / "metrics.jsonl") if r["kind"] == "incident"]
    assert incidents[0]["by_reason"] == {"too_long": incidents[0]["samples"]} == {"too_long": counts[0]}
    skipped = (folder / "long clips" / "data_skipped.jsonl").read_text().splitlines()
    found = {(entry["stream"], entry["kind"], entry["tokens"]) for entry in map(json.loads, skipped)}
    assert found == {(0, "clip", 128), (1, "clip", 128)}
    assert incidents[-1]["total"] == len(skipped)


def test_waiting_for_data_takes_at_most_the_time_of_the_steps(ended: dict[str, Any], folder: Path) -> None:
    """Step 1 does not include reading the first micro-batch, which builds the loader."""
    shares = [share for name in ("sound", "long clips") for share in scalars(folder / name, "data_wait_share").values()]
    assert 0 < max(shares) <= 1


@pytest.mark.slow
def test_torchrun_fails_and_the_record_keeps_the_true_code(folder: Path, damaged: tuple[Path, str, str]) -> None:
    """One rank reads the damaged shard; the other one only loses its peer.

    torchrun turns the rank's exit code 3 into 1; nemo-run's main would turn it into 0, a success.
    """
    data, shard, key = damaged
    run_dir, log = folder / "torchrun", folder / "torchrun.log"
    with started(letters(data, run_dir, training__num_steps=6), log, ranks=2) as process:
        assert process.wait(timeout=240) == 1, log.read_text()
    record = outcome(run_dir)
    assert (record["code"], record["reason"]) == (3, "data")
    assert key in record["error"]
    assert shard in record["error"]
    assert f"rank {record['rank']}: error: dropped damaged sample '{key}'" in log.read_text()
    assert f"rank {1 - record['rank']}: unexpected error" not in log.read_text()
    root_cause = log.read_text().partition("Root Cause")[2]  # the end of torchrun's output
    assert re.search(r"exitcode +: 3 ", root_cause)
    assert f"traceback : error: dropped damaged sample '{key}'" in root_cause


def accusation(message: str) -> tuple[str, list[str]]:
    """Return the rank and the samples that an error about a loss names."""
    who, _, names = message.partition("The loss of ")[2].partition(" is not finite, on the samples ")
    return who, names.partition("; look at these")[0].split(", ")


def own_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the exit record of each failed rank."""
    return [json.loads(path.read_text()) for path in sorted(run_dir.glob("exit.rank*.json"))]


@pytest.mark.parametrize(("name", "step", "file"), [("nan", 4, "nan.pt"), ("nan on one rank", 3, "nan_2.pt")])
def test_nan_stops_every_rank_before_the_update(
    ended: dict[str, Any], folder: Path, name: str, step: int, file: str
) -> None:
    """The weights in memory and in the newest checkpoint are those of the last good step, to the bit."""
    runs = ended[name] if isinstance(ended[name], list) else [ended[name]]
    assert [run.code for run in runs] == [4] * len(runs)
    record = outcome(folder / name)
    assert (record["code"], record["reason"], record["step"]) == (4, "not_finite", step - 1)
    assert f"step {step}: loss=nan, grad_norm=nan; the update was not applied" in record["error"]
    assert len(loss_values(folder / name)) == step - 1
    assert checkpoints(folder / name)[-1] == checkpoint(folder / name, step - 1).name
    saved = read_tensors(checkpoint(folder / name, step - 1))
    assert_same_bits(torch.load(folder / file), {k: v for k, v in saved.items() if k.startswith("weight.")})


def test_nan_names_the_samples_of_that_step(ended: dict[str, Any]) -> None:
    """The step had eight samples, and the error names eight, all from this step."""
    accused, named = accusation(ended["nan"].err)
    assert (accused, len(named)) == ("rank 0", 8)
    assert all(name.startswith("train_") for name in named)


def test_nan_on_one_rank_names_only_that_rank_and_its_samples(ended: dict[str, Any], folder: Path) -> None:
    """All exit records have the same error, whichever rank wrote them; only rank 0 prints it."""
    read = [json.loads((folder / f"nan_2.rank{rank}.json").read_text()) for rank in range(2)]
    assert not set(read[0]) & set(read[1])
    for record in [outcome(folder / "nan on one rank"), *own_records(folder / "nan on one rank")]:
        accused, named = accusation(record["error"])
        assert accused == "rank 1"
        assert sorted(named) == sorted(read[1])
    assert [run.err.count("error: step 3: loss=nan") for run in ended["nan on one rank"]] == [1, 0]


def test_a_full_disk_keeps_the_previous_checkpoint(ended: dict[str, Any], folder: Path) -> None:
    """All ranks fail and none waits, if a disk is full on one rank, on either of two, or at rank 0's index."""
    outputs = [ended["disk"], ended["disk of rank 0"][0], ended["disk of rank 1"][1], ended["disk at the index"][0]]
    for run in outputs:
        for words in ("checkpoint of step 6 was not written", "the checkpoint of step 4 is intact"):
            assert words in run.err
    pairs = [ended[name] for name in ("disk of rank 0", "disk of rank 1", "disk at the index")]
    assert [run.code for run in [ended["disk"], *(run for pair in pairs for run in pair)]] == [6] * 7


def test_a_run_resumes_unchanged_after_a_full_disk(ended: dict[str, Any], folder: Path) -> None:
    assert ended["repaired"].code == 0, ended["repaired"].err
    assert_same_bits(read_tensors(folder / "loaded"), read_tensors(checkpoint(folder / "sound", 4)))
    assert checkpoints(folder / "sound") == ["iter_0000004", "iter_0000006"]
    assert [outcome(folder / "sound")[key] for key in ("code", "step")] == [0, 6]
    found = {}
    for record in read_records(folder / "sound" / "metrics.jsonl"):
        if "loss" in record:
            found.setdefault(record["step"], []).append(record["loss"])
    assert [len(values) for values in found.values()] == [1, 1, 1, 1, 5, 5]
    for values in found.values():
        assert values == pytest.approx([values[0]] * len(values), rel=ROUNDING)


def test_a_disk_error_at_any_write_fails_the_save_on_all_ranks(ended: dict[str, Any], folder: Path) -> None:
    for limit, (code, message, left) in zip(LIMITS, ended["sweep"], strict=True):
        assert code == 6, (limit, message)
        assert left == ["iter_0000001"], limit
        assert "the checkpoint of step 1 is intact" in message
    assert checkpoints(folder / "sweep") == [f"iter_{1 + len(LIMITS):07d}"]


def test_the_error_of_a_full_disk_has_its_numbers(ended: dict[str, Any], small_disk: Path) -> None:
    if not os.path.ismount(small_disk):
        pytest.skip("mounting a small disk is not allowed here")
    run, run_dir = ended["small disk"], small_disk / "run"
    assert run.code == outcome(run_dir)["code"] == 6
    for words in ("is full; it needs about", "bytes", "free now", "keep_last=9", "is intact"):
        assert words in run.err
    steps = len(checkpoints(run_dir))
    assert checkpoints(run_dir) == [f"iter_{step:07d}" for step in range(1, steps + 1)]
    assert len(read_tensors(checkpoint(run_dir, steps))) > 0
