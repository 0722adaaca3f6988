"""launch/README.md: torchrun and the launcher accept its commands; its images contain the modules that they start."""

import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from benchmarks.gpu_stages import STAGES
from launch import cli, train

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "launch" / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line[line.index("torchrun") :]
    for _, text in BLOCKS
    for line in text.replace("\\\n", " ").splitlines()
    if re.search(r"torchrun .*-m launch\.train", line)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_torchrun_and_the_launcher_accept_each_command(command):
    """Every flag, the recipe and every overridden setting exist."""
    parsed = get_args_parser().parse_args(shlex.split(command)[1:])
    assert (parsed.module, parsed.training_script) == (True, "launch.train")
    task = train.resolve(cli.parse(parsed.training_script_args))
    assert task.data.path == "/data/latents"


def test_the_image_contains_every_program_of_on_gpu():
    """The folders of the modules and tests that benchmarks/on_gpu.sh runs, of those that they start, and pytest."""
    images = (REPOSITORY / "Dockerfile").read_text().split("\nFROM ")[1:]
    assert [image.splitlines()[0].rpartition(" AS ")[2] for image in images] == ["cpu", "cuda"]
    assert all(image.count("\nCMD ") == image.count("\nWORKDIR ") == 1 for image in images)
    words = [command.words for stage in STAGES.values() for command in stage.commands]
    started = {w[1].partition("/")[0] if w[0] == "pytest" else w[0].partition(".")[0] for w in words} | {"launch"}
    assert started == {"benchmarks", "launch", "tests"}
    for image in images:
        copied = set(re.findall(r"^COPY (\w+) ", image, re.MULTILINE))
        assert started <= copied
        assert copied == {"dit", "recipes", "energon_data", "launch", "benchmarks", "examples", "tests"}
    assert "pytest" in images[1]
