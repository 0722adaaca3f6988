"""`make demo-edit` in few steps: the commands of the Makefile, from fonts to edits of held-out letters."""

import re
import shutil
import subprocess
from pathlib import Path

import matplotlib
import pytest
from PIL import Image

from examples.letters.edits import read_drawings
from tests.unit.launch.pages import ROOT, follow

TRAINING = "training.num_steps=2 training.global_batch_size=8 training.micro_batch_size=4 model.num_layers=1 "
TRAINING += "model.hidden_size=32 logging.tensorboard=False schedule.warmup_steps=0"
SHORT = {
    "examples.letters.edits": "--fonts fonts --variations 1",
    "energon_data.prepare letters": "--fonts fonts --variations 1 --size 16",
    "energon_data.prepare images": "--processes 1",
    "launch.train": f"{TRAINING} model.context_size=257",
    "launch.sample": "--steps 1",
    "launch.evaluate": "--steps 1 --minimum 0 --minimum-style 0",
}
"""Additional arguments of each command; they override earlier ones."""
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "STIXGeneral", "STIXGeneralBol")


def commands(target: str) -> list[str]:
    """Return the commands that make would run for a target if no data existed."""
    words = ["--dry-run", "--always-make", "VENV=none", "PYTHON=none", target, "--old-file=none/.installed"]
    done = subprocess.run(["make", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    shown = done.stdout.replace("\\\n", " ")
    lines = [line for line in shown.splitlines() if line.startswith(("none/bin/python -m", "none/bin/torchrun"))]
    lines = [re.sub(r"^none/bin/(python|torchrun .*?) -m", "python -m", line) for line in lines if " pip " not in line]
    return [line.replace("all-minilm-l6-v2", "identity") for line in lines]


@pytest.mark.slow
def test_the_commands_of_the_demo_edit_held_out_letters(tmp_path: Path) -> None:
    (tmp_path / "fonts").mkdir()
    for name in FONTS:
        shutil.copy(Path(matplotlib.get_data_path()) / "fonts/ttf" / f"{name}.ttf", tmp_path / "fonts")
    lines = commands("demo-edit")
    assert len(lines) == len(SHORT)
    ended = follow({line: next(SHORT[name] for name in SHORT if name in line) for line in lines}, tmp_path)
    held_out = {drawing.family for drawing in read_drawings(tmp_path / "data/letter_pairs") if drawing.held_out}
    assert len(held_out) == 1
    assert "nearest to the font family of the original, in that style:" in ended[lines[-1]].out
    for name in ("edit.png", "edits.png"):
        assert Image.open(tmp_path / name).width > 0
