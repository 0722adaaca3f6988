"""On a GPU, steps have equal operations, except for the lines below, which prevent a CUDA graph."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.host import wait_job
from benchmarks.sequence import SequenceRecorder, differences, record_steps
from benchmarks.waits import meta_device
from dit.tracing.packs import PackShape

STEPS = 3  # the packs of a job repeat after three
KEYS = ("dit/objectives/addressed_noise.py",)
"""File that copies the number of the step from the host to the device."""
DENSE = PackShape(((1, 16, 16),) * 4)
PACKS = [
    PackShape(grids, total_tokens=2048)
    for grids in (
        ((1, 16, 16), (1, 8, 8), (4, 8, 8), (1, 8, 16)),
        ((1, 8, 16), (4, 8, 8), (1, 16, 16), (1, 8, 8)),
        ((1, 16, 8), (2, 8, 8), (1, 8, 8), (4, 16, 16)),
    )
]
"""All lengths are multiples of the rows of a block, so that the kernels have equal tables of blocks."""
ATTENTION = {"numbers torch_attn._varlen_attn.default", "numbers torch_attn._varlen_attn_backward.default"}
"""The length of the longest sample is a number on the host."""


def differing_operations(packs: list[PackShape], recipe: str, kernels: Any) -> set[str]:
    """Return the operations that differ between steps, except those of the noise."""
    job = wait_job(recipe, "packed", kernels)
    if job.pack.text_lengths:
        packs = [replace(pack, text_lengths=(5, 6, 7, 8)) for pack in packs]
    job = replace(job, pack=packs[0], packs=tuple(packs))
    first, *others = record_steps(job, STEPS)
    assert len(first) > 500
    lines = sum((differences(first, other) for other in others), Counter[str]())
    return {line.partition(", ")[0] for line in lines if not line.partition(", ")[2].startswith(KEYS)}


@pytest.mark.parametrize(
    ("recipe", "kernels", "expected"),
    [
        ("tiny_dit", "eager", set()),
        ("tiny_dit", "triton", set()),
        pytest.param("tiny_ldm_unet", "eager", set(), marks=pytest.mark.slow),
    ],
)
def test_steps_of_dense_batches_are_equal(recipe: str, kernels: str, expected: set[str]) -> None:
    assert differing_operations([DENSE], recipe, kernels) == expected


def test_steps_of_packs_with_equal_numbers_of_samples_and_tokens_differ_in_attention() -> None:
    assert differing_operations(PACKS, "tiny_dit", "triton") == ATTENTION


def test_each_difference_is_detected() -> None:
    """The difference may be an operation, a shape, a number, or the memory that remains allocated."""
    recorder, held = SequenceRecorder(), list[torch.Tensor]()

    def step(size: int = 3, factor: float = 2.0, *, add: bool = False, keeps: bool = False) -> Any:
        recorder.begin()
        values = torch.empty(size, device="meta")
        result = values + 1 if add else values * factor
        if keeps:
            held.append(result)
        del result
        torch.empty(7, device="meta")
        return recorder.operations

    with meta_device(recorder):
        first = step()
        assert not differences(first, step())
        for change in ({"size": 4}, {"factor": 3.0}, {"add": True}, {"keeps": True}):
            assert differences(first, step(**change)), change
