"""The table of work on the host; times are not compared, because they depend on the machine."""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from benchmarks import host
from dit.backends.device import use_cuda
from dit.backends.process_groups import ProcessGroups
from dit.kernels.fused import ops


def test_every_layer_has_a_row_for_each_kind_of_kernels(one_rank_world: ProcessGroups) -> None:
    rows = [line.split("|")[1:-1] for line in host.rows(one_rank_world, 1)]
    names = {(layer.strip(), kernels.strip()) for layer, kernels, *_ in rows}
    assert names >= {(case.name, kernels) for case in host.CASES for kernels in ("eager", "fused")}
    assert all(0 < float(shortest) <= float(middle) for _, _, shortest, middle, _ in rows)


@pytest.mark.skipif(use_cuda(), reason="the kernel would run")
def test_fused_kernels_are_disabled_only_during_timing() -> None:
    x_TF = torch.zeros(4, 8)
    with host.kernels_do_nothing():
        assert ops.activation(x_TF, None, False).shape == x_TF.shape
    from dit.kernels.fused.gpu import activations

    assert inspect.getmodule(activations.activation) is activations


@pytest.mark.skipif(use_cuda(), reason="the kernel would run")
def test_tracers_see_fused_operators() -> None:
    """Without a profiler or a mode, ops bypass torch's dispatcher; with one, they must not."""
    x_TF = torch.zeros(4, 8)
    with host.kernels_do_nothing():
        with torch.profiler.profile() as profile:
            ops.activation(x_TF, None, False)
        with FakeTensorMode() as mode:
            fake_TF = mode.from_tensor(x_TF)
            in_mode = ops.activation(fake_TF, None, False)
        after_mode = ops.activation(fake_TF, None, False)
    assert "dit::activation" in {event.key for event in profile.key_averages()}
    assert isinstance(in_mode, FakeTensor)
    assert isinstance(after_mode, FakeTensor)
