"""Record the kernels that have passed on this machine, for `auto`; see `dit.parallel.verified_kernels`."""

from collections.abc import Generator
from pathlib import Path

import pytest

from dit.backends import megatron_cpu
from dit.parallel.verified_kernels import record_results

RESULTS, COMPLETE = pytest.StashKey[dict[str, bool]](), pytest.StashKey[bool]()
MARKER = "verifies"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARKER}(name): the test verifies a kernel, such as `layers.triton`")
    config.stash[RESULTS], config.stash[COMPLETE] = {}, True


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        item.config.stash[COMPLETE] = False


@pytest.fixture(autouse=True)
def real_cuda() -> None:
    """Skip if an earlier CPU test redirected this process's CUDA calls."""
    if megatron_cpu.install.cache_info().currsize:
        pytest.skip("CUDA calls of this process were redirected to CPU; run tests/gpu in a process of its own")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count a kernel as passed if at least one of its tests ran and none failed."""
    report = yield
    marker, results = item.get_closest_marker(MARKER), item.config.stash[RESULTS]
    if marker and (report.failed or (report.passed and report.when == "call")):
        name = marker.args[0]
        results[name] = results.get(name, True) and report.passed
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the record, unless tests were deselected or ran in another process (pytest-xdist)."""
    config, folder = session.config, Path(__file__).parent
    files = {item.path for item in session.items if item.path.parent == folder}
    complete = config.stash[COMPLETE] and not session.shouldstop and not any("::" in word for word in config.args)
    one_process = not hasattr(config, "workerinput")
    if config.stash[RESULTS] and complete and one_process and files == set(folder.glob("test_*.py")):
        record_results(config.stash[RESULTS])
