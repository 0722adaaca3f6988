"""examples/flux2/README.md: all commands work as shown, in order; training and sampling take few steps."""

import shlex
from pathlib import Path

import pytest

from tests.support.ranks import Job, run_jobs
from tests.unit.launch.pages import run_line, shown_commands

pytestmark = pytest.mark.slow

SHORT = {
    "launch.train": "training.num_steps=2 training.precision=fp32 logging.tensorboard=False",
    "launch.sample": "--steps 2",
    "energon_data.prepare": "--count 4",
}
"""Words added to a command; later words override earlier ones."""


def test_every_command_of_the_page_works(tmp_path: Path) -> None:
    """The last command compares the pictures of both code bases."""
    jobs = {
        line: Job(run_line, {"line": f"{line} {SHORT.get(shlex.split(line)[2], '')}", "folder": tmp_path})
        for line in shown_commands(Path("examples/flux2/README.md"))
    }
    ended = run_jobs(tmp_path / "world", jobs)
    assert {line: end.err for line, end in ended.items() if end.code} == {}
    assert "examples.flux2.compare" in list(jobs)[-1]
    assert (tmp_path / "both.png").exists()
