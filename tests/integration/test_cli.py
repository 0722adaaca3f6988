"""A tiny recipe trains, resumes from its recorded settings and draws samples."""

import json
from pathlib import Path

from tests.integration import actions
from tests.integration.runs import training
from tests.support.ranks import Job, call, run_jobs


def test_a_recipe_trains_resumes_and_draws(tmp_path):
    """The path of a new user: train on two ranks, continue on one from the run's `config.yaml`, draw samples."""
    run_dir = tmp_path / "run"
    picture = tmp_path / "x.png"
    jobs = {
        "first": training("tiny_dit", run_dir, 2, training__num_steps=2, schedule__warmup_steps=1, objective="edm"),
        "record": Job(Path.read_text, {"self": run_dir / "exit.json"}),
        "again": call(actions.train, "--yes", "--yaml", run_dir / "config.yaml", "training.num_steps=3"),
        "draw": call(actions.draw, "--checkpoint", run_dir, "--steps", 2, "--out", picture),
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
