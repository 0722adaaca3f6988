"""The launcher under torchrun: what the seed command promises, and that a failing run is not a success."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import actions
from tests.support.ranks import Job, run_jobs

OWN = "tests.unit.launch.recipes_for_tests.ending"


def torchrun(*arguments: str, ranks: int = 2) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "launch.train", "--yes", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(("run_dir", "succeeds"), [("fine", True), ("RANK1:data", False)])
def test_torchrun_fails_when_one_rank_fails(run_dir, succeeds):
    """torchrun turns the rank's code 3 into 1; nemo-run's own main would make it 0, a success."""
    done = torchrun("--factory", OWN, f"training.run_dir={run_dir}")
    assert done.returncode == (0 if succeeds else 1)
    assert ("rank 1: error: shard 7 is gone" in done.stderr) == (not succeeds)
    assert ("Root Cause" in done.stderr) == (not succeeds)
    if not succeeds:  # the last lines of torchrun: the code that the process ended with, and its error
        root_cause = done.stderr.partition("Root Cause")[2]
        assert re.search(r"exitcode +: 3 ", root_cause)
        assert "traceback : error: shard 7 is gone" in root_cause


def test_a_recipe_trains_resumes_and_draws(tmp_path):
    """The newcomer's path: train on two ranks, continue from the run's own record on one, look at samples."""
    run_dir = tmp_path / "run"
    short = ["training.num_steps=2", "schedule.warmup_steps=1"]
    first = ["--yes", "--factory", "tiny_dit", f"training.run_dir={run_dir}", *short, "objective=edm"]
    picture = tmp_path / "x.png"
    again = ["--yes", "--yaml", str(run_dir / "config.yaml"), "training.num_steps=3"]
    draw = ["--checkpoint", str(run_dir), "--steps", "2", "--out", str(picture)]
    jobs = {
        "first": Job(actions.train, {"arguments": first}, 2),
        "record": Job(Path.read_text, {"self": run_dir / "exit.json"}),
        "again": Job(actions.train, {"arguments": again}),
        "draw": Job(actions.draw, {"arguments": draw}),
    }
    ended = run_jobs(tmp_path / "world", jobs)
    assert [rank.code for rank in ended["first"]] == [0, 0], ended["first"][0].err
    assert [rank.out.count("EDM(") for rank in ended["first"]] == [1, 0]
    assert json.loads(ended["record"])["code"] == 0
    assert ended["again"].code == 0, ended["again"].err
    steps = [json.loads(line).get("step") for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(s for s in steps if s is not None) == 3
    assert ended["draw"].code == 0, ended["draw"].err
    assert picture.is_file()
