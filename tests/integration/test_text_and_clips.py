"""Letters drawn from text and moving letters, from shards to pictures and films: a short run of each recipe."""

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional

import matplotlib
import numpy as np
import pytest
import yaml
from PIL import Image

from dit.data_api import sample_id
from dit.encoders.text_config import ENCODERS
from dit.monitoring.flops import PackFlops
from dit.monitoring.sinks import scalars_by_step
from dit.run_config import RunConfig
from energon_data.prepare.shards import npy_bytes
from examples.letters.moving import CLASS_NAMES, FPS, prepare_moving_letters
from examples.letters.stills import prepare_letters
from tests.integration import actions
from tests.integration.runs import TINY, loss_values, read_records, training
from tests.support.ranks import Job, call, run_jobs

pytestmark = pytest.mark.slow

ROUNDING = 1e-5  # relative, fp32: sums in another order
ENCODER = "all-minilm-l6-v2"
needs_encoder = pytest.mark.skipif(
    any(find_spec(package) is None for package in ("transformers", ENCODERS[ENCODER].package)),
    reason="needs the extra 'text'",
)
STEPS, FRAMES = 4, 3
SHORT = {
    "training.num_steps": STEPS,
    "training.sample_interval": STEPS,
    "training.ema_decay": 0.5,
    "sampling.num_steps": 2,
    "model.patch_spatial": 4,
}


def train(factory: str, data: Path, run_dir: Path, ranks: int = 1, **settings: Any) -> Job:
    named = {key.replace(".", "__"): value for key, value in {**TINY, **SHORT}.items()}
    return training(factory, run_dir, ranks, **{**named, "data__path": data, **settings})


def draw(run_dir: Path, out: Path, *arguments: str) -> Job:
    return call(actions.draw, "--checkpoint", run_dir, "--steps", 2, "--out", out, *arguments)


@pytest.fixture(scope="module")
def font(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fonts")
    source = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    (folder / "f.ttf").write_bytes(source.read_bytes())
    return folder


@pytest.fixture(scope="module")
def clips(font: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("clips")
    sizes = {"size": 8, "frames": FRAMES, "stills": FRAMES, "variations": 1}
    data = prepare_moving_letters(folder / "data", fonts=[font], **sizes).folder
    run_dir = folder / "run"
    jobs = {
        # A clip has 12 tokens, a still 4.
        "train": train(
            "letters_dit",
            data,
            run_dir,
            model__num_classes=len(CLASS_NAMES),
            model__position_embedding="sincos_3d",
            data__max_tokens_per_pack=44,
            data__pack_multiple_of=4,
            training__micro_batch_size=1,
            training__global_batch_size=2,
            logging__tensorboard=True,
        ),
        "gif": draw(run_dir, folder / "x.gif", "--labels", "Q left,R up", "--fps", "5"),
        "own rate": draw(run_dir, folder / "own.gif", "--labels", "Q left,R up"),
        "png": draw(run_dir, folder / "x.png", "--labels", "Q left,R up"),
    }
    return folder, run_jobs(folder / "world", jobs)


def test_clips_are_written_as_a_film_and_as_a_row_of_frames(clips: tuple[Path, dict[str, Any]]) -> None:
    folder, done = clips
    assert {name: ended.code for name, ended in done.items()} == dict.fromkeys(done, 0), done
    metadata = json.loads(next((folder / "run").rglob("metadata.json")).read_text())
    assert metadata.pop("guard")["bad_steps"] == []
    assert metadata.pop("skipped_updates") == 0
    # Packs mix stills and clips; samples are clips.
    unnamed = {"text_encoder": None, "autoencoder": None, "attributions": [], "reference_aspect": None}
    assert metadata == {"class_names": CLASS_NAMES, "latent_size": [FRAMES, 8, 8], "fps": FPS, **unnamed}
    with Image.open(folder / "x.gif") as film, Image.open(folder / "x.png") as row:
        assert film.n_frames == FRAMES
        assert film.info["duration"] == 200
        assert row.size[0] > row.size[1]


def test_films_play_at_the_rate_of_the_training_data(clips: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = clips
    (drawn_while_training,) = (folder / "run" / "samples").rglob("ema.gif")
    for path in (folder / "own.gif", drawn_while_training):
        with Image.open(path) as film:
            assert film.info["duration"] == 10 * round(100 / FPS)  # a GIF counts hundredths of a second


def test_the_samples_of_a_run_on_clips_move(clips: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = clips
    (path,) = (folder / "run" / "samples").rglob("ema.*")
    with Image.open(path) as film:
        assert (path.suffix, film.n_frames) == (".gif", FRAMES)
    (record,) = (r for r in read_records(folder / "run" / "metrics.jsonl") if r["kind"] == "image")
    assert Path(record["path"]) == path


def fake_texts(captions: Iterable[str], _: Optional[str]) -> dict[str, dict[str, bytes]]:
    """Replace the text encoder: embed each caption as random vectors of the width that the recipes expect."""

    def embed(caption: str) -> bytes:
        rng = np.random.default_rng(sample_id(caption))
        return npy_bytes(rng.standard_normal((len(caption.split()), 384)).astype(np.float16))

    return {caption: {"text.npy": embed(caption)} for caption in captions}


@pytest.fixture(scope="module")
def mixed(font: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """`moving_letters_mixed` on its data on one rank and two, and on a blend with letters, which have other classes."""
    folder = tmp_path_factory.mktemp("mixed")
    with pytest.MonkeyPatch.context() as patch:
        for module in ("stills", "moving"):
            patch.setattr(f"examples.letters.{module}.encode_captions", fake_texts)
        small: dict[str, Any] = {"fonts": [font], "size": 8, "variations": 1}
        prepare_moving_letters(folder / "moving", frames=4, stills=2, **small)
        prepare_letters(folder / "letters", **small)
    own = {
        "training__micro_batch_size": 1,
        "training__global_batch_size": 2,
        "training__sample_interval": 0,
        "data__max_tokens_per_pack": 62,
        "data__pack_multiple_of": 2,
        "data__packing_buffer_size": 32,
        "data__pad_packs": True,
        "sampling__prompts": "none",
    }
    blend = f"[{{path: {folder / 'letters'}}}, {{path: {folder / 'moving'}}}]"
    runs = {"moving_1": (1, {}), "moving_2": (2, {}), "blend_2": (2, {"data__blend": blend})}
    jobs = {
        name: train("moving_letters_mixed", folder / "moving", folder / name, ranks, **own, **more)
        for name, (ranks, more) in runs.items()
    }
    embedding = folder / "q.npy"
    np.save(embedding, np.ones((3, 384), np.float32))
    for frames, name in ((1, "still"), (None, "clip"), (3, "odd")):
        words = [] if frames is None else ["--frames", str(frames)]
        jobs[name] = draw(folder / "moving_1", folder / f"{name}.gif", "--condition", "context", str(embedding), *words)
    return folder, run_jobs(folder / "world", jobs)


def test_images_and_clips_of_one_pack_train_equally_on_one_and_two_ranks(mixed: tuple[Path, dict[str, Any]]) -> None:
    """A patch has two frames, so stills are padded in time; letters with other classes join a model without classes."""
    folder, done = mixed
    ends = [e for ended in done.values() for e in (ended if isinstance(ended, list) else [ended])]
    assert [e.code for e in ends] == [0, 0, 0, 0, 0, 0, 0, 2], done
    one, two = (loss_values(folder / f"moving_{ranks}") for ranks in (1, 2))
    assert len(one) == STEPS
    assert two == pytest.approx(one, rel=ROUNDING)
    assert len(loss_values(folder / "blend_2")) == STEPS
    for name in ("moving_1", "blend_2"):
        metadata = json.loads(next((folder / name).rglob("metadata.json")).read_text())
        assert metadata["class_names"] is None
        assert metadata["latent_size"] == [4, 8, 8]


def test_padding_and_the_work_of_the_slowest_rank_are_logged(mixed: tuple[Path, dict[str, Any]]) -> None:
    """The logged values are computed again from the packs: one pack per rank on two ranks, both packs on one rank."""
    folder, _ = mixed
    config = RunConfig.from_record(yaml.safe_load((folder / "moving_2" / "config.yaml").read_text()))
    _, spec = config.check(2)
    flops, seed = PackFlops(config.model), config.training.seed
    streams = [config.data.build_train(spec, dp_rank=r, dp_size=2, seed=seed, log_dir=None) for r in range(2)]
    logged = [scalars_by_step(read_records(folder / f"moving_{ranks}" / "metrics.jsonl")) for ranks in (1, 2)]
    for one, two in zip(*(steps.values() for steps in logged)):
        packs = [next(stream) for stream in streams]
        work = [flops.training(p.layout, p.grids, p.conditions["context"].layout) for p in packs]
        tokens = [(p.layout.valid_tokens, p.layout.total_tokens) for p in packs]
        assert two["work_imbalance"] == pytest.approx(2 * max(work) / sum(work))
        assert one["work_imbalance"] == 1
        padding = 1 - sum(valid for valid, _ in tokens) / sum(total for _, total in tokens)
        assert two["padding_share"] == pytest.approx(padding, abs=1e-9)
        assert padding > 0
    assert len(logged[1]) == STEPS
    assert max(step["work_imbalance"] for step in logged[1].values()) > 1


def test_a_mixed_run_draws_a_still_or_a_clip(mixed: tuple[Path, dict[str, Any]]) -> None:
    folder, done = mixed
    with Image.open(folder / "still.gif") as still, Image.open(folder / "clip.gif") as clip:
        assert still.n_frames == 1
        assert 1 < clip.n_frames <= 4  # equal frames in a row are one frame of a GIF
    assert "frames=3 cannot be cut into patches of 2 frames; use a multiple, or 1 for a still" in done["odd"].err


@needs_encoder
def test_prompts_are_drawn_while_training_and_on_command(font: Path, tmp_path: Path) -> None:
    """The checkpoint records the data set's encoder; other prompts or a negative prompt change the picture."""
    data = prepare_letters(tmp_path / "data", fonts=[font], variations=1, text_encoder=ENCODER).folder
    run_dir, prompts = tmp_path / "run", ["the letter Q", "the letter R in a sans font"]
    jobs = {
        "train": train("letters_text", data, run_dir, optimizer__lr=0.03, sampling__prompts=json.dumps(prompts)),
        "prompts": draw(run_dir, tmp_path / "a.png", "--prompt", *prompts),
        "others": draw(run_dir, tmp_path / "b.png", "--prompt", "the letter A", "the letter B"),
        "negative": draw(run_dir, tmp_path / "c.png", "--prompt", *prompts, "--negative-prompt", "the letter X"),
        "own": draw(run_dir, tmp_path / "d.png"),
    }
    done = run_jobs(tmp_path / "world", jobs)
    assert {name: ended.code for name, ended in done.items()} == dict.fromkeys(jobs, 0), done
    pictures = {name: (tmp_path / f"{name}.png").read_bytes() for name in "abcd"}
    assert len({pictures[name] for name in "abc"}) == 3
    assert pictures["d"] == pictures["a"]  # without arguments, the run's prompts are drawn
    metadata = json.loads(next(run_dir.rglob("metadata.json")).read_text())
    assert metadata["text_encoder"] == ENCODER
    (path,) = (run_dir / "samples").rglob("ema.png")
    with Image.open(path) as grid:
        assert grid.size[0] > grid.size[1]  # two prompts side by side
