"""Avatars end to end: draw and caption the data, train the recipe a few steps, and evaluate samples."""

import json
from pathlib import Path
from typing import Any

import pytest

from dit.errors import EXIT_OK, ConfigError
from examples.avatars import design
from examples.avatars.drawings import ATTRIBUTES
from tests.integration import actions
from tests.integration.runs import loss_values, training
from tests.support.ranks import call, run_jobs

pytestmark = pytest.mark.slow

STEPS, COUNT = 12, 48
TINY: dict[str, Any] = {
    "data__background": False,
    "model__hidden_size": 32,
    "model__num_layers": 1,
    "model__num_attention_heads": 2,
    "training__micro_batch_size": 8,
    "training__global_batch_size": 16,
    "training__num_steps": STEPS,
    "training__log_interval": 1,
    "checkpoint__interval": STEPS,
    "logging__tensorboard": False,
    "schedule__warmup_steps": 0,
    "optimizer__lr": 5e-3,
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    try:
        design.parts()
    except ConfigError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("avatars")
    data = ["avatars", "--count", COUNT, "--processes", 1, "--text-encoder", "all-minilm-l6-v2"]
    judged = ["--checkpoint", folder / "run", "--metric", "avatars", "--avatars", 3, "--steps", 2, "--json"]
    jobs = {
        "draw": call(actions.prepare, *data, "--out", folder / "data"),
        "train": training("avatars_text", folder / "run", **TINY, data__path=folder / "data"),
        "judge": call(actions.evaluate, *judged, "--out", folder / "avatars.png", "--minimum", 1.0),
    }
    return folder, run_jobs(folder / "world", jobs)


def test_the_recipe_learns_and_names_the_design(done: tuple[Path, dict[str, Any]]) -> None:
    folder, ended = done
    assert [ended[name].code for name in ("draw", "train")] == [EXIT_OK, EXIT_OK], ended
    assert design.ATTRIBUTION in ended["draw"].out
    losses = loss_values(folder / "run")
    assert losses[-1] < 0.8 * losses[0]


def test_samples_of_each_kind_are_read_and_drawn(done: tuple[Path, dict[str, Any]]) -> None:
    folder, ended = done
    assert ended["judge"].code == 1
    assert ended["judge"].err.count("below the minimum of 100.0 %: attributes of a new") == 2
    scores = {score["kind"]: score for score in json.loads(ended["judge"].out)["scores"]}
    assert scores.keys() == {"trained", "new combination", "new pair"}
    for score in scores.values():
        assert score["samples"] == 3
        assert score["attributes"] == pytest.approx(sum(score["by_attribute"].values()) / len(ATTRIBUTES))
    assert scores["trained"]["drawing_to_trained"] == 0 < scores["new pair"]["drawing_to_trained"]
    assert (folder / "avatars.png").stat().st_size > 0
