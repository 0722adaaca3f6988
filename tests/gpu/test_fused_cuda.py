"""The fused kernels on CUDA against the eager ones in float64, at widths and packs of published models."""

import pytest
import torch

from dit.kernels import adamw as eager_adamw
from dit.kernels import layer_kernels
from dit.kernels.adamw import Elements, Rates
from dit.kernels.group_norm import Groups
from dit.kernels.layer_kernels import EAGER
from dit.kernels.modulation import NormModulation
from dit.kernels.rope import HeadNorm, Heads, Rotation
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.verifies("layers.triton"),
]
CUDA = torch.device("cuda")
PACK = SequenceLayout.from_lengths([1000, 77, 2048, 300], multiple_of=64, total_tokens=3584, device=CUDA)
LARGE, WIDTH = 2**31, 12288
# Euclidean error of a full tensor compared with float64: about half an ulp of bf16, and sums in float32.
RTOL = {torch.bfloat16: 4e-3, torch.float32: 5e-6}


def draws(*shapes):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(CUDA) for shape in shapes]


def run(function, leaves):
    inputs = [x.detach().clone().requires_grad_() for x in leaves]
    out = function(*inputs)
    loss = sum((part.double() * torch.linspace(-3, 4, part.numel(), device=CUDA).view_as(part)).sum() for part in out)
    return [x.detach() for x in (*out, *torch.autograd.grad(loss, inputs))]


def check(operation, leaves, dtype):
    """Compare the fused form in `dtype` with the eager one in float64; two fused runs must be equal to the bit."""
    rounded = [x.to(dtype) for x in leaves]
    fused = layer_kernels.fused()
    got, again = (run(lambda *x: operation(fused, *x), rounded) for _ in range(2))
    want = run(lambda *x: operation(EAGER, *x), [x.double() for x in rounded])
    for i, (actual, theirs) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(actual, again[i])
        error = float((actual.double() - theirs).norm() / theirs.norm())
        assert error <= RTOL[dtype], f"result {i} is off by {error:.1e}"


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("width", [384, 1152, 3072, 4096, 6144, 8192])
def test_residual_and_norm(width, dtype):
    def operation(kernels, x, y, gate, bias, shift, scale):
        return kernels.residual_norm_modulate(x, y, gate, bias, NormModulation(shift, scale, 1e-6), PACK)

    tokens, samples = (PACK.total_tokens, width), (PACK.num_samples, width)
    check(operation, draws(tokens, tokens, samples, (width,), samples, samples), dtype)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize(("heads", "size"), [(24, 128), (16, 72), (12, 64)])
def test_heads(heads, size, dtype):
    angles = draws((PACK.total_tokens, 1, size // 2))[0]

    def operation(kernels, x, weight_q, weight_k):
        rotation = Rotation(angles.cos().float(), angles.sin().float())  # the eager rotation is float32 for any input
        return kernels.split_heads(x, heads, Heads(1), HeadNorm(weight_q, weight_k, 1e-6), rotation)

    check(operation, draws((PACK.total_tokens, heads, 3, size), (size,), (size,)), dtype)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("name", ["gelu_tanh", "swiglu", "geglu_tanh"])
def test_activations(name, dtype):
    check(lambda kernels, x, bias: [getattr(kernels, name)(x, bias)], draws((3584, 4608), (4608,)), dtype)


def operations(tokens, last):
    """Return functions of a pack of tokens, whose last sample has `last` tokens."""
    layout = SequenceLayout.from_lengths([n for n in (tokens - last, last) if n], device=CUDA)
    samples, fused = layout.num_samples, layer_kernels.fused()
    shift, scale, gate, weight, bias = (x.bfloat16() for x in draws(*[(2, WIDTH)] * 3, (128,), (WIDTH,)))
    into, norm = NormModulation(shift[-samples:], scale[-samples:], 1e-6), HeadNorm(weight, weight, 1e-6)
    return {
        "residual_norm": lambda x: fused.residual_norm_modulate(x, x, gate[-samples:], None, into, layout),
        "gelu": lambda x: [fused.gelu_tanh(x, bias)],
        "swiglu": lambda x: [fused.swiglu(x, None)],
        "heads": lambda x: fused.split_heads(x, WIDTH // (3 * 128), Heads(1), norm),
    }


@pytest.mark.parametrize("name", ["residual_norm", "gelu", "swiglu", "heads"])
def test_tokens_after_2_31_elements_equal_those_of_a_short_pack(name):
    """Offsets have 64 bits: results and gradients of the last sample are equal to the bit."""
    if torch.cuda.get_device_properties(CUDA).total_memory < 70e9:
        pytest.skip("needs 70 GB of memory")
    last, results = 64, []
    of_last = draws((last, WIDTH))[0].bfloat16()
    for tokens in (last, LARGE // WIDTH + last):
        x = torch.zeros(tokens, WIDTH, dtype=torch.bfloat16, device=CUDA)
        x[-last:] = of_last
        out = operations(tokens, last)[name](x.requires_grad_())
        torch.autograd.backward(out, [part.detach() for part in out])
        results.append([part.detach()[-last:].clone() for part in (*out, x.grad)])
        del x, out
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize(("channels", "side"), [(128, 64), (320, 32), (1280, 8)])
def test_group_norm(channels, side, dtype):
    """With scale, shift and SiLU, on channels-last pictures."""

    def operation(kernels, x, weight, bias, scale, shift):
        groups = Groups(weight, bias, 32, 1e-5)
        x = x.contiguous(memory_format=torch.channels_last)
        return [kernels.norm_groups(x, groups, scale, shift, activate=True)]

    shapes = (4, channels, side, side), (channels,), (channels,), (4, channels), (4, channels)
    check(operation, draws(*shapes), dtype)


@pytest.mark.verifies("optimizer.triton")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "not_aligned"])
def test_adamw(half, shift):
    """Every element of every tensor is within some ulps of the reference in float64."""
    from dit.kernels.fused.adamw import adamw

    clip = torch.tensor(0.37, device=CUDA)
    rates = Rates(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.1, step=3, clip=clip, average=0.3)
    found, exact = [], []
    for size in (5, 16384 * 3 + 77, 1 << 22):
        drawn = [x.float()[shift:] for x in draws(*[(size + shift,)] * 5)]
        drawn[3] = drawn[3].square()
        found.append(Elements(*drawn, torch.zeros(size + shift, dtype=half, device=CUDA)[shift:]))
        exact.append(Elements(*(x.double() for x in drawn), None))
    adamw(found, rates)
    eager_adamw.adamw(exact, rates)
    for actual, theirs in zip(found, exact, strict=True):
        for name in ("main", "exp_avg", "exp_avg_sq", "average"):
            torch.testing.assert_close(getattr(actual, name).double(), getattr(theirs, name), rtol=1e-5, atol=2e-6)
        assert torch.equal(actual.model, actual.main.to(half))


@pytest.mark.verifies("optimizer.triton")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "not_aligned"])
def test_addition_of_gradients(half, shift):
    """Equal to torch's addition to the bit, with one rounding."""
    from dit.kernels.fused.gradients import add_gradients

    mains = [draws((size + shift,))[0].float()[shift:] for size in (5, 16384 * 3 + 77, 1 << 22)]
    gradients = [torch.cat([main[:shift], main]).flip(0).to(half)[shift:] for main in mains]
    want = [main + gradient.float() for main, gradient in zip(mains, gradients, strict=True)]
    add_gradients(mains, gradients)
    assert all(map(torch.equal, mains, want))


@pytest.mark.verifies("noise.triton")
@pytest.mark.parametrize("channels", [10, 16, 64])
def test_noise(channels):
    """Equal to the eager form, which rounds angles to float32 before the sine."""
    from dit.kernels.fused.noise import mix

    ids = torch.tensor([3, 2**62 + 5, -41, 9], device=CUDA)
    ones, zeros = torch.ones(4, device=CUDA), torch.zeros(4, device=CUDA)
    actual, theirs = (AddressedNoise(2**40 + 5, 977, ids, PACK, None, kernel) for kernel in (mix, None))
    x0 = torch.zeros(PACK.total_tokens, channels, device=CUDA)
    got, again = (actual.mix(x0, (zeros, ones))[0] for _ in range(2))
    assert torch.equal(got, again)
    torch.testing.assert_close(got, theirs.normal_TC("eps", channels), rtol=0, atol=4e-6)
