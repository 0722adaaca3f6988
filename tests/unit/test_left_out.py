"""The test run prints how many tests were deselected."""

import subprocess
import sys

from tests.support.repository import REPOSITORY

FOUR = """
import pytest

@pytest.mark.parametrize("i", range(3))
@pytest.mark.slow
def test_slow(i):
    pass

def test_quick():
    pass
"""


def test_the_number_of_skipped_tests_is_printed_with_xdist(tmp_path):
    """The summary of xdist does not include them."""
    (tmp_path / "test_four.py").write_text(FOUR)
    options = ["-p", "xdist", "-p", "tests.left_out", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-n", "2", "-m", "not slow", "."],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 tests were left out by their mark: `make test-parallel`" in done.stdout
