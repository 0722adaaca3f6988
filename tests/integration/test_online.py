"""Training on pixels and captions that are encoded online has the losses of stored latents, on every layout."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from energon_data.prepare.__main__ import main as prepare
from tests.integration import actions
from tests.integration.runs import assert_same_bits, checkpoint, loss_values, read_tensors, scalars, training
from tests.support.encoders import CLIP_WIDTH, T5_WIDTH, save_clip, save_t5, save_vae
from tests.support.ranks import Job, call, run_jobs, selected

pytestmark = pytest.mark.slow

STORED = 1e-3  # relative: stored latents and embeddings are float16
ROUNDING = 1e-5  # relative, fp32: sums in another order
STEPS = 4
# Context-parallel ranks divide the encoding like tensor-parallel ones, and then divide the tokens of the latents.
LAYOUTS = {
    "tp2": {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True},
    "cp2": {"parallel__context_parallel_size": 2},
    "pp2": {"parallel__pipeline_model_parallel_size": 2},
    "dp2": {"parallel__data_parallel": "distributed_optimizer"},
}


def pictures(folder: Path) -> Path:
    """Write pictures of three sizes with captions of several lengths."""
    rng = np.random.default_rng(0)
    for i in range(40):
        size = ((16, 16), (16, 32), (24, 16))[i % 3]
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(folder / f"p{i:02d}.png")
        words = ("red", "blue")[i % 2], ("circle", "square")[i // 2 % 2], *["left"] * (i % 4)
        (folder / f"p{i:02d}.txt").write_text(f"a {' '.join(words)}")
    return folder


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("online")
    (folder / "in").mkdir()
    vae = save_vae(folder / "vae")
    text, pooled = f"text={save_t5(folder / 't5')}", f"pooled={save_clip(folder / 'clip')}"
    common = ["images", "--in", str(pictures(folder / "in")), "--multiple-of", "8", "--validation", "0.2"]
    encoded = ["--vae", str(vae), "--text-encoder", text, "--text-encoder", pooled]
    assert prepare([*common, "--processes", "1", "--out", str(folder / "pixels")]) == 0
    assert prepare([*common, "--processes", "1", "--out", str(folder / "latents"), *encoded]) == 0

    def train(name: str, ranks: int = 1, **settings) -> Job:
        online = {"data__path": folder / "pixels", "data__online_vae": vae}
        online["data__online_text_encoder"] = f"{text},{pooled}"
        stored = {"data__path": folder / "latents"}
        own = {
            **{"data": "energon", "data__num_streams": 2, "data__max_tokens_per_pack": 32, "data__shuffle_buffer": 8},
            **{"data__packing_buffer_size": 8, "data__pad_packs": True, "data__background": False},
            **{"parallel__data_parallel": "ddp"},
            **{"model__context_size": T5_WIDTH, "model__pooled_size": CLIP_WIDTH, "model__context_dropout": 0.4},
            **{"training__num_steps": STEPS, "training__log_interval": 1, "training__validation_interval": STEPS},
            **{"training__micro_batch_size": 1, "training__global_batch_size": 4, "logging__tensorboard": False},
            **{"training__precision": "fp32", "sampling__num_steps": 2},
            **(stored if name == "stored" else online),
        }
        return training("tiny_flux", folder / name, ranks, **{**own, **settings})

    jobs = {
        "stored": train("stored"),
        "online": train("online"),
        "first half": train("halves", training__stop_at_step=2),
        "second half": train("halves"),
        **{name: train(name, 2, **LAYOUTS[name]) for (name,) in sorted(selected(request, ("name",)))},
    }
    for name in ("stored", "online"):
        words = ["--prompt", "a red circle", "--negative-prompt", "", "--out", folder / f"{name}.png"]
        jobs[f"draw {name}"] = call(actions.draw, "--checkpoint", folder / name, *words)
    results = run_jobs(folder / "world", jobs)
    for name, job in jobs.items():
        ended = results[name] if job.ranks > 1 else [results[name]]
        assert {e.code for e in ended} == {75 if name == "first half" else 0}, (name, ended)
    return folder


def test_online_losses_equal_those_of_stored_latents_and_embeddings(runs: Path) -> None:
    """Texts are dropped for the same samples, and the held-out losses are equal, too."""
    stored, online = (loss_values(runs / name) for name in ("stored", "online"))
    assert len(online) == STEPS
    assert online == pytest.approx(stored, rel=STORED)
    held_out = [scalars(runs / name, "held_out/loss")[STEPS] for name in ("stored", "online")]
    assert held_out[1] == pytest.approx(held_out[0], rel=STORED)


@pytest.mark.parametrize("name", LAYOUTS)
def test_online_losses_equal_those_of_one_rank(runs: Path, name: str) -> None:
    assert loss_values(runs / name) == pytest.approx(loss_values(runs / "online"), rel=ROUNDING)


def test_a_resumed_run_is_bitwise_equal(runs: Path) -> None:
    assert loss_values(runs / "halves") == loss_values(runs / "online")
    assert_same_bits(*(read_tensors(checkpoint(runs / name, STEPS)) for name in ("halves", "online")))


def test_prompts_are_embedded_by_the_encoders_of_the_data(runs: Path) -> None:
    """The encoders are recorded by the data set (stored) or by the run (online): T5's tokens and CLIP's vector."""
    stored, online = (np.asarray(Image.open(runs / f"{name}.png")).astype(int) for name in ("stored", "online"))
    assert stored.std() > 0
    assert abs(stored - online).max() <= 8  # of 255; the data of the two runs differ by float16 rounding
