"""A trace has exactly the requested steps."""

import gzip
import json

import pytest
import torch

from dit.errors import ConfigError
from dit.monitoring.profile import StepProfile
from dit.settings import LoggingConfig

OPERATIONS = (torch.sin, torch.cos, torch.tan, torch.exp)
"""What step 1, 2, ... does."""


def traced(path, steps, *, start=1):
    """Return the steps whose operations are in the trace of a loop."""
    with StepProfile(path, steps) as profile:
        for step in range(start, len(OPERATIONS) + 1):
            profile.before(step)
            OPERATIONS[step - 1](torch.ones(2))
            profile.after(step)
    if not path.exists():
        return None
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    return [step + 1 for step, operation in enumerate(OPERATIONS) if f"aten::{operation.__name__}" in names]


@pytest.mark.parametrize(
    ("steps", "start", "expected"),
    [
        pytest.param([2, 3], 1, [2, 3], id="in the middle"),
        pytest.param([1, 1], 1, [1], id="one step"),
        pytest.param([2, 3], 3, [3], id="resumed between the two"),
        pytest.param([4, 9], 1, [4], id="the run ends before"),
        pytest.param([7, 9], 1, None, id="never reached"),
        pytest.param([1, 2], 3, None, id="resumed after"),
        pytest.param(None, 1, None, id="not asked for"),
    ],
)
def test_a_trace_contains_its_steps(tmp_path, steps, start, expected):
    assert traced(tmp_path / "profile" / "rank_0.json.gz", steps, start=start) == expected


@pytest.mark.parametrize("steps", [[], [3], [0, 1], [3, 2], [1, 2, 3]])
def test_invalid_intervals_of_steps_are_refused(steps):
    with pytest.raises(ConfigError, match=r"logging\.profile_steps="):
        LoggingConfig(profile_steps=steps).validate()
