"""`launch.verify --full` as its page starts it: under torchrun, with the reference in a process of its own."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import environment
from tests.unit.launch.pages import shown_commands

PAGE = Path("docs/debugging-a-wrong-gradient.md")


@pytest.mark.slow  # four processes that import everything: half a minute
def test_the_documented_torchrun_names_the_parameter_that_is_stated_wrongly(tmp_path: Path) -> None:
    """Of all parameters that one alone; the command fails, and leaves nothing of its reference behind."""
    (line,) = (line for line in shown_commands(PAGE) if line.startswith("torchrun"))
    words = shlex.split(line.replace("tiny_dit_pack", "tests.integration.wrong_gradient.tiny"))
    flags = ["parallel.sequence_parallel=True", "--scratch", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words[1:], *flags],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    out = done.stdout
    assert out.startswith("2 ranks against one, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, ")
    assert "\nchecks of one rank, largest relative errors:\n  padding     0.0e+00 (bound 0e+00)\n" in out, done.stderr
    assert "\nfirst wrong gradient of the backward pass: head.linear.bias\n" in out
    assert "\n1 of 31 gradients differ" in out
    assert "copies that differ between ranks: head.linear.bias, head.linear.bias (average)\n" in out
    assert out.count("\nin ") == 1  # rank 0 alone reports
    assert done.returncode == 1
    assert "error: the layout differs from one rank" in done.stderr.partition("Root Cause")[2]
    assert list(tmp_path.iterdir()) == []
