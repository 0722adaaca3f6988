"""Memory that was freed is reused."""

import subprocess
import sys

import pytest

from dit import heap

PROGRAM = """
import resource
from dit.heap import keep_freed_memory
assert {kept} is False or keep_freed_memory({{}})

def faults(number):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in range(number):  # pieces of changing sizes, all freed at once, as the tensors of a step
        pieces = [b"x" * (2**20 + 4096 * (size % 7)) for _ in range(20)]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(10)
print(faults(10))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_pages_are_reused_without_page_faults():
    """Allocate and free 20 MiB ten times: without the setting, every allocation causes page faults."""
    counts = [
        int(subprocess.run([sys.executable, "-c", PROGRAM.format(kept=kept)], capture_output=True, check=True).stdout)
        for kept in (False, True)
    ]
    assert counts[0] > 10_000
    assert counts[1] < 100


@pytest.mark.parametrize("name", heap.VARIABLES)
def test_settings_of_the_user_are_kept(name: str):
    assert not heap.keep_freed_memory({name: "1"})
