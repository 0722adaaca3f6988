"""A base model and a super-resolution model are trained, resumed and sampled as a cascade."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.integration import actions
from tests.integration.runs import training
from tests.support.ranks import call, run_jobs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two steps of each model, a resumed run, and samples of the cascade for a text."""
    folder = tmp_path_factory.mktemp("cascade")
    np.save(folder / "words.npy", np.random.default_rng(0).standard_normal((3, 32), np.float32))
    np.save(folder / "given.npy", np.zeros((2, 3, 4, 4), np.float32))
    steps = {"tiny_imagen": 2, "tiny_imagen_sr": 2, "resumed": 3}
    names = {name: "tiny_imagen_sr" if name == "resumed" else name for name in steps}
    short = {name: {"logging__tensorboard": False, "training__num_steps": steps[name]} for name in names}
    jobs = {name: training(recipe, folder / recipe, **short[name]) for name, recipe in names.items()}
    stages = [f"{name}={folder / run}" for name, run in (("base", "tiny_imagen"), ("sr", "tiny_imagen_sr"))]
    asked = ["--condition", "context", folder / "words.npy", "--count", 2, "--steps", 2]
    out = ["--out", folder / "x.png", "--save-latents", folder / "x.safetensors"]
    jobs["drawn"] = call(actions.draw, "--cascade", *stages, *asked, *out)
    alone = ["--checkpoint", folder / "tiny_imagen_sr", *asked, "--out", folder / "alone.png"]
    jobs["alone"] = call(actions.draw, *alone)
    given = ["--low-resolution", folder / "given.npy", "--save-latents", folder / "alone.safetensors"]
    jobs["given"] = call(actions.draw, *alone, *given, "--augmentation", 3)
    return {"folder": folder, **run_jobs(folder / "world", jobs)}


def latents(folder: Path, name: str) -> torch.Tensor:
    (found,) = load_file(folder / f"{name}.safetensors").values()
    return found


def test_every_stage_writes_its_pictures(done: dict[str, Any]) -> None:
    """Pictures of the second stage are four times as large."""
    assert [done[name].code for name in ("tiny_imagen", "tiny_imagen_sr", "resumed", "drawn")] == [0] * 4
    folder = done["folder"]
    assert {path.name for path in folder.glob("x_*.png")} == {"x_base.png", "x_sr.png"}
    assert latents(folder, "x_base").shape == (2, 3, 1, 16, 16)
    assert latents(folder, "x_sr").shape == (2, 3, 1, 64, 64)


def test_a_super_resolution_model_without_a_base_needs_pictures(done: dict[str, Any]) -> None:
    assert done["alone"].code != 0
    assert "this model enlarges a low-resolution picture" in done["alone"].err
    assert done["given"].code == 0
    assert latents(done["folder"], "alone").shape == (2, 3, 1, 16, 16)
