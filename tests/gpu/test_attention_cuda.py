"""The attention cases of the CPU tests on CUDA, with every implementation that this machine supports."""

import pytest
import torch
from torch.nn.attention import SDPBackend, restore_flash_attention_impl, sdpa_kernel

from dit.kernels.attention import Attention, segment_sdpa, varlen_attention
from dit.kernels.choice import Implementation, Target, choose
from dit.kernels.resolve import ATTENTION
from dit.layout import SequenceLayout
from tests.unit.kernels.attention_cases import CASES, GQA_CASES, AttentionCase, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Euclidean error of a full tensor: both sides get equal inputs, so only the probabilities and the result are rounded,
# by about one ulp (2**-8 and 2**-11) each.
RTOL = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 2e-5}
HALF = [torch.bfloat16, torch.float16]
DEVICE = torch.device("cuda")

# Head sizes of the published models: DiT 64, DiT-XL 72, the 7B and MovieGen 128.
LARGE_CASES = [
    AttentionCase("dit_xl", (256, 256, 256), heads=16, kv_heads=16, head_size=72),
    AttentionCase("image_and_video", (256, 2048, 64, 1024), multiple_of_q=64, tail_q=128, head_size=128),
    AttentionCase("text", (700, 300), (77, 512), multiple_of_q=16, multiple_of_k=8, head_size=64),
]


@pytest.fixture(autouse=True)
def own_flash_attention():
    """Undo the replacement of torch's flash kernels by FlashAttention 3 or 4."""
    yield
    restore_flash_attention_impl(_raise_warn=False)


@pytest.fixture(autouse=True)
def full_precision_reference(monkeypatch: pytest.MonkeyPatch):
    """Disable TF32 in the reference's matrix products."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def check_on_cuda(attention: Attention, case: AttentionCase, dtype: torch.dtype) -> None:
    check(attention, case, case.qkv(dtype, DEVICE), rtol=RTOL[dtype])


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", [*CASES, *LARGE_CASES], ids=lambda case: case.name)
def test_varlen_kernel_equals_the_reference(case: AttentionCase, dtype: torch.dtype):
    check_on_cuda(varlen_attention, case, dtype)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("case", [*CASES, *GQA_CASES, *LARGE_CASES], ids=lambda case: case.name)
def test_segment_sdpa_equals_the_reference(case: AttentionCase, dtype: torch.dtype):
    """With the backend that torch selects."""
    check_on_cuda(segment_sdpa, case, dtype)


@pytest.mark.parametrize("case", [*CASES, *GQA_CASES, *LARGE_CASES], ids=lambda case: case.name)
@pytest.mark.parametrize(
    "backend",
    [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION],
    ids=lambda backend: backend.name.lower(),
)
def test_every_sdpa_backend_equals_the_reference(backend: SDPBackend, case: AttentionCase):
    """Only this backend, in bf16. A case that it does not support is skipped and not computed by another one."""
    with sdpa_kernel(backend):
        try:
            check_on_cuda(segment_sdpa, case, torch.bfloat16)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            pytest.skip(f"{backend.name} refuses this case on {torch.cuda.get_device_name()}")


@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_automatic_implementation_equals_the_reference(case: AttentionCase, dtype: torch.dtype):
    """The implementation that training uses on this machine."""
    target = Target(DEVICE, dtype, frozenset({case.head_size}))
    check_on_cuda(choose(ATTENTION, target).load(), case, dtype)


@pytest.mark.parametrize("case", [*CASES, *LARGE_CASES], ids=lambda case: case.name)
@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, id=one.name, marks=pytest.mark.verifies(f"attention.{one.name}"))
        for one in ATTENTION.implementations
        if one.opt_in_reason
    ],
)
def test_a_requested_implementation_equals_the_reference(one: Implementation[Attention], case: AttentionCase):
    """After this test has passed, `auto` may select the implementation."""
    reason = one.unmet_requirement(Target(DEVICE, torch.bfloat16, frozenset({case.head_size})))
    if reason:
        pytest.skip(f"{one.name} {reason}")
    check_on_cuda(one.load(), case, torch.bfloat16)


@pytest.mark.parametrize("longer", [(), (2,)], ids=["dense", "ragged"])
@pytest.mark.parametrize(("segments", "heads", "head_size"), [(70_000, 2, 64), (24_576, 16, 72)])
def test_attention_to_one_token_in_each_of_many_segments_is_its_value(segments, heads, head_size, longer):
    """As in temporal attention to a pack of images; the second is that of `pretrain_stdit_xl`."""
    layout = SequenceLayout.from_lengths([1] * segments + [*longer], device=DEVICE)
    shape = layout.total_tokens, heads, head_size
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = varlen_attention(q, k, v, layout, layout)
    grad = torch.randn_like(out)
    out.backward(grad)
    torch.testing.assert_close(out[:segments], v[:segments])
    torch.testing.assert_close(v.grad[:segments], grad[:segments])
    assert all(x.grad[:segments].abs().max() < 1e-2 for x in (q, k))


def test_varlen_attention_ignores_padding_values():
    """NaN in padding rows must not reach any output row or the gradient of a real row."""
    case = AttentionCase("padded", (50, 3, 17), multiple_of_q=16, tail_q=32, head_size=64)
    layout, _ = case.layouts(DEVICE)
    padding = ~layout.valid_T[:, None, None]
    leaves = [x.masked_fill(padding, float("nan")).requires_grad_() for x in case.qkv(torch.bfloat16, DEVICE)]
    out = varlen_attention(*leaves, layout, layout)
    assert out.isfinite().all()
    out.float().square().sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)
