"""docs/own-data.md: its commands, as shown, from pictures and videos to decoded samples, in few steps.

The quick suite runs the two commands that every reader needs. The slow test runs all, including the autoencoder's.
"""

import json
import shlex
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from energon_data.media_files import video_bytes
from tests.integration.actions import Ended
from tests.support.encoders import save_vae
from tests.unit.launch import pages
from tests.unit.launch.pages import shown_commands

LINES = [line for line in shown_commands(Path("docs/own-data.md")) if line.startswith("python")]
TRAINING = "training.num_steps=2 logging.tensorboard=False schedule.warmup_steps=0"
OWN = f"{TRAINING} training.sample_interval=2 sampling.num_steps=2 model.hidden_size=48 model.num_layers=1 "
OWN += "data.packing_buffer_size=16"
AUTOENCODER = f"{TRAINING} model.block_out_channels=[8,8,8,8] model.norm_num_groups=2"
SHORT = {"launch.sample": "--steps 2", "energon_data.prepare": "--processes 1 --size 64"}
"""Words added to a command; later words override earlier ones."""


def own_files(folder: Path) -> None:
    """Write the files that the page assumes: captioned pictures and clips, also in the formats of other tools."""
    for name in ("pictures", "tars", "hub", "kohya/10_sks dog", "films"):
        (folder / name).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(12):
        size = ((80, 96), (72, 64), (64, 64))[i % 3]
        picture = Image.fromarray(np.kron(rng.integers(0, 256, (8, 8, 3)), np.ones((12, 12, 1))).astype(np.uint8))
        picture.resize(size).save(folder / "pictures" / f"{i}.jpg")
        (folder / "pictures" / f"{i}.txt").write_text(("a red circle", "a blue square")[i % 2])
    with tarfile.open(folder / "tars" / "0.tar", "w") as tar:
        for path in sorted((folder / "pictures").iterdir()):
            tar.add(path, path.name)
    for i in range(3):
        frames = [Image.new("RGB", (64, 64), (10 * t, 80 * i, 0)) for t in range(8)]
        (folder / "pictures" / f"clip{i}.mp4").write_bytes(video_bytes(frames, 8.0))
        (folder / "pictures" / f"clip{i}.txt").write_text("a red square")
    rows = []
    for path in sorted((folder / "pictures").glob("*.jpg")):
        shutil.copy(path, folder / "kohya" / "10_sks dog")
        (folder / "kohya" / "10_sks dog" / f"{path.stem}.txt").write_text("sks dog, red, circle")
        rows.append({"image": {"bytes": path.read_bytes(), "path": path.name}, "text": "a red circle"})
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "hub" / "train.parquet")
    for name in ("edited", "originals"):
        shutil.copytree(folder / "pictures", folder / name, ignore=shutil.ignore_patterns("clip*"))
    shutil.copy(folder / "edited" / "0.jpg", folder / "photo.jpg")
    shutil.copy(folder / "pictures" / "clip0.mp4", folder / "films" / "a.mp4")
    (folder / "clips.jsonl").write_text('{"file_name": "a.mp4", "start": 0, "end": 1, "caption": "a wave"}')


def follow(folder: Path, lines: list[str]) -> dict[str, Ended]:
    def added(line: str) -> str:
        words = shlex.split(line)
        more = (AUTOENCODER if "pictogram_autoencoder" in words else OWN) if "launch.train" in words else ""
        return more or SHORT.get(words[2], "")

    return pages.follow({line: added(line) for line in lines}, folder)


def grid(folder: Path, name: str) -> Image.Image:
    return Image.open(folder / name)


def test_two_commands_produce_decoded_samples(tmp_path):
    """The autoencoder compresses 4 x 4 pixels, so the largest sample has 64 x 64; the grid has two captions."""
    own_files(tmp_path)
    save_vae(tmp_path / "models" / "vae")
    prepare, train = (
        next(line for line in LINES if words in line) for words in ("--out data/mine", "--factory own_data")
    )
    ended = follow(tmp_path, [prepare, train])
    assert "skipped, other_kind: 3; clip0.mp4: `prepare folder` takes pictures and videos" in ended[prepare].out
    drawn = grid(tmp_path, "runs/mine/samples/step_0000002/ema.png")
    assert drawn.size == (4 + 2 * (64 + 4), 4 + 64 + 2 * 16 + 4)  # captions have two lines
    assert np.asarray(drawn)[24:80].std() > 0


@pytest.mark.slow
def test_samples_of_two_references_are_prepared_trained_redrawn_and_drawn(tmp_path):
    """One of twelve samples lacks the picture of the second folder."""
    own_files(tmp_path)
    shutil.copytree(tmp_path / "originals", tmp_path / "styles", ignore=shutil.ignore_patterns("0.*"))
    texts = "--validation 0.3 --text-encoder identity"
    lines = [
        f"python -m energon_data.prepare images --in edited --reference originals styles --out data/two {texts}",
        "python -m launch.train --yes --factory \"own_data(data='data/two')\" training.validation_interval=2",
        "python -m launch.sample --checkpoint runs/two --reference photo.jpg styles/1.jpg --prompt blue --out two.png",
    ]
    follow(tmp_path, lines)
    described = json.loads((tmp_path / "data" / "two" / "dataset.json").read_text())
    assert (described["edited"], described["most_references"]) == (12, 2)
    assert sum(described["reference_shapes"].values()) == 23
    assert grid(tmp_path, "two.png").format == "PNG"
    assert grid(tmp_path, "runs/two/samples/step_0000002/ema.png").size[0] > 64


@pytest.mark.slow
def test_every_command_of_the_page_works(tmp_path):
    own_files(tmp_path)
    texts = "--size 256 --text-encoder all-minilm-l6-v2"
    commands = [
        f"python -m energon_data.prepare huggingface --in hub --out data/hub {texts}",
        "python -m launch.train --yes --factory \"own_data(data='data/theirs')\"",
        'python -m launch.sample --checkpoint runs/both --prompt "a red circle" --count 4 --frames 1 --out still.png',
        "python -m energon_data.inspect data/mine --sheet mine.png",
    ]
    follow(tmp_path, LINES + commands)
    assert len(LINES) == 16
    described = {
        name: json.loads((tmp_path / "data" / name / "dataset.json").read_text()) for name in ("hub", "dog", "films")
    }
    assert [found["skipped"] for found in described.values()] == [{}, {}, {}]
    for name in ("runs/mine/samples/step_0000002/ema.png", "red.png", "mine.png", "still.png", "blue.png"):
        assert grid(tmp_path, name).format == "PNG"
    assert (tmp_path / "my-pipeline" / "model_index.json").is_file()
    assert grid(tmp_path, "runs/theirs/samples/step_0000002/ema.png").format == "PNG"
    for name in ("runs/both/samples/step_0000002/ema.gif", "moving.gif"):
        assert grid(tmp_path, name).n_frames == 8
