"""Moving micro-batches to a CUDA device: the host does not wait for the device."""

from dataclasses import replace

import pytest
import torch

from dit.condition_table import CONTEXT, LABEL
from dit.data_api import BatchSpec
from dit.step.device_batches import DeviceBatches
from energon_data.mock import MockData

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_micro_batch_is_copied_without_waiting_for_the_device():
    """Copies from pageable memory would wait for earlier steps."""
    conditions = (replace(LABEL, num_classes=10), replace(CONTEXT, shape=(64,)))
    sizes = {"patch_temporal": 1, "patch_spatial": 2, "latent_channels": 4, "micro_batch_size": 64}
    spec = BatchSpec(conditions=conditions, **sizes)
    expected, read = (
        MockData(height=32, width=32).build_train(spec, dp_rank=0, dp_size=1, seed=0, log_dir=None) for _ in range(2)
    )
    batches = DeviceBatches(read, torch.device("cuda"), spec, lambda batch: 0)
    next(batches)
    next(expected)
    busy, free = torch.cuda.Event(), torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(200):
        free = (free @ free).clamp(-1, 1)
    busy.record()
    moved = next(batches)
    assert not busy.query(), "the copies were queued, and the device was still at work"
    assert torch.equal(moved.latents_TC.cpu(), next(expected).latents_TC)
