"""The norm of many gradients: the number of Megatron-Core's fallback, in a few operations."""

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm
from torch.utils._python_dispatch import TorchDispatchMode

from dit.backends import foreach


class Counter(TorchDispatchMode):
    """Counts operations, and those that copy a number to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(3,), (5, 7), (0,), *[(11, 2)] * 20]
    return [torch.randn(size, generator=generator) for size in sizes]


def test_the_norm_is_that_of_all_numbers_to_the_bit_of_the_fallback(one_rank_world):
    given, flag = gradients(), torch.zeros(1, dtype=torch.int)
    with Counter() as counter:
        norm, _ = foreach.l2_norm(65536, flag, [given], False)
    assert norm.shape == (1,)
    assert torch.equal(norm, local_multi_tensor_l2_norm(65536, flag, [given], False)[0])
    exact = torch.cat([x.flatten().double() for x in given]).norm()
    torch.testing.assert_close(norm.double(), exact[None], rtol=1e-6, atol=0)
    assert counter.waits == 0
    assert counter.operations < 10


def test_the_norm_uses_it_where_there_is_no_apex(monkeypatch):
    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    foreach.install()
    assert clip_grads.l2_norm_impl is foreach.l2_norm
    fused = object()
    monkeypatch.setattr(clip_grads, "l2_norm_impl", fused)
    foreach.install()
    assert clip_grads.l2_norm_impl is fused
