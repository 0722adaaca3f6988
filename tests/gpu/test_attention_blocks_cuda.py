"""The block kernels of context parallelism on CUDA. One process computes the blocks of all ranks."""

import pytest
import torch

from dit.context_parallel.attention import merge
from dit.context_parallel.partition import ContextPartition
from dit.kernels.attention import reference_attention
from dit.kernels.attention_blocks import Attended, Block, EagerBlocks, FlashBlocks
from dit.layout import SequenceLayout
from tests.gpu.test_attention_cuda import HALF, LARGE_CASES, RTOL
from tests.unit.kernels.attention_cases import CASES, AttentionCase, check
from tests.unit.kernels.test_attention_blocks import OneBlock

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def fp32_reference(monkeypatch: pytest.MonkeyPatch):
    """Disable TF32 in the reference."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", [*CASES, *LARGE_CASES], ids=lambda case: case.name)
def test_flash_block_equals_the_reference(case: AttentionCase, dtype: torch.dtype):
    check(OneBlock(FlashBlocks()), case, case.qkv(dtype, CUDA), rtol=RTOL[dtype])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_eager_block_equals_the_reference(case: AttentionCase):
    check(OneBlock(EagerBlocks()), case, case.qkv(torch.float32, CUDA), rtol=RTOL[torch.float32])


@pytest.mark.parametrize("split", ["contiguous", "load_balanced"])
def test_flash_blocks_sum_to_full_attention(split: str):
    """Ring attention: merged outputs and summed gradients are correct, also if a block has no token of a sample."""
    layout = SequenceLayout.from_lengths([120, 5, 333, 1], multiple_of=8, total_tokens=512, device=CUDA)
    rows, kernel = ContextPartition(layout, 4, split), FlashBlocks()
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(512, 4, 64, generator=generator).to(CUDA, torch.bfloat16) for _ in range(4))
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    exact = reference_attention(*leaves, layout, layout)
    (exact * grad.float()).sum().backward()
    out, lse = torch.zeros(512, 4, 64, device=CUDA), torch.full((512, 4), -torch.inf, device=CUDA)
    pairs = [(mine, other) for mine in range(4) for other in range(4)]
    blocks, local = rows.blocks(), [rows.of_rank(rank) for rank in range(4)]
    for mine, other in pairs:
        block = Block(q[local[mine]], k[local[other]], v[local[other]], blocks[mine], blocks[other])
        joined = merge(Attended(out[local[mine]], lse[local[mine]]), kernel.forward(block))
        out[local[mine]], lse[local[mine]] = joined
    sums = [torch.zeros_like(out) for _ in range(3)]
    for mine, other in pairs:
        a, b = local[mine], local[other]
        block, joined = Block(q[a], k[b], v[b], blocks[mine], blocks[other]), Attended(out[a].to(q.dtype), lse[a])
        for total, at, part in zip(sums, (a, b, b), kernel.backward(grad[a], block, joined)):
            total[at] += part
    for got, want in zip((out, *sums), (exact.detach(), *(x.grad for x in leaves))):
        assert (got - want).norm() / want.norm() <= RTOL[torch.bfloat16]
