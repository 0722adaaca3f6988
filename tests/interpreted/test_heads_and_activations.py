"""Fused heads (norm, rotation, split) and activations against formulas in float64: values and every gradient."""

import pytest
import torch

from dit.kernels.fused import activations
from dit.kernels.fused import heads as fused
from dit.kernels.rope import HeadNorm, Heads, Rotation
from tests.interpreted import formulas
from tests.support.ranks import rows

DTYPES = {"fp32": (torch.float32, 8.0), "bf16": (torch.bfloat16, 1.5)}
EPS = 1e-5
KINDS = {"qkv": Heads(1), "grouped": Heads(3), "queries": Heads(1, keys=False, values=False), "keys_values": Heads(0)}


def check(kind, *, tokens, groups, size, norm, rope, bias=False, precision="fp32"):
    dtype, ulps = DTYPES[precision]
    heads = KINDS[kind]
    parts = heads.queries + heads.keys + heads.values
    angles = 6 * torch.rand(tokens, 1, size // 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rotation = Rotation(angles.cos().float(), angles.sin().float()) if rope else None

    def kernel(x, weight_q, weight_k, b):
        of_heads = HeadNorm(weight_q, weight_k, EPS) if norm else None
        given = x if b is None else x + b.detach().view(x.shape[1:])  # as the projection does, without a gradient
        return fused.split_heads(given, groups, heads, of_heads, rotation, b)

    def reference(x, weight_q, weight_k, b):
        return formulas.heads(x, heads, weight_q, weight_k, EPS, angles if rope else None, b)

    shapes = (
        (tokens, groups, parts, size),
        (size,) if norm and heads.queries else None,
        (size,) if norm and heads.keys else None,
        (groups * parts * size,) if bias else None,
    )
    formulas.check(kernel, reference, formulas.draws(*shapes), dtype, ulps)


BOTH, NORM, ROPE, NEITHER = (True, True), (True, False), (False, True), (False, False)
# Each kind with two of the four combinations of norm and rotation; the second one has the mark `slow`.
PARTS = {"qkv": (BOTH, NEITHER), "grouped": (ROPE, NORM), "queries": (NORM, ROPE), "keys_values": (BOTH, NEITHER)}


@pytest.mark.parametrize(
    ("kind", "norm", "rope"),
    rows(
        [(kind, *parts) for kind, pair in PARTS.items() for parts in pair],
        lambda kind, *parts: PARTS[kind][0] == tuple(parts),
    ),
)
def test_norm_and_rotation_equal_their_formulas_together_and_separately(kind, norm, rope):
    check(kind, tokens=18, groups=5, size=6, norm=norm, rope=rope)


@pytest.mark.parametrize("size", [72, 128, 256])
def test_every_head_size_equals_the_formula(size):
    check("qkv", tokens=5, groups=2, size=size, norm=True, rope=True)


def test_a_head_of_an_odd_size_is_normalised():
    check("qkv", tokens=5, groups=2, size=7, norm=True, rope=False)


@pytest.mark.parametrize("norm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_gradient_of_the_projection_bias_is_the_sum_over_tokens(norm):
    """With more tokens than fit one block."""
    check("qkv", tokens=37, groups=5, size=8, norm=norm, rope=True, bias=True)


def test_bf16_equals_the_formula():
    check("grouped", tokens=9, groups=2, size=16, norm=True, rope=True, precision="bf16")


def test_values_and_unchanged_heads_are_views():
    """Only changed parts are copied."""
    x = torch.randn(4, 3, 3, 8)
    q, k, v = fused.split_heads(x, 3, Heads(1))
    assert {t.untyped_storage().data_ptr() for t in (q, k, v)} == {x.untyped_storage().data_ptr()}
    q, _, v = fused.split_heads(x, 3, Heads(1), HeadNorm(torch.ones(8), torch.ones(8), EPS))
    assert v.data_ptr() == x[:, :, 2].data_ptr()
    assert q.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("name", ["gelu", "swiglu", "geglu"])
@pytest.mark.parametrize(("tokens", "width", "bias"), [(3, 2, False), (5, 250, True), (1, 4100, True), (37, 10, True)])
def test_activations_equal_their_formulas(name, tokens, width, bias):
    """Rows in one block and in several, columns in one block and in several."""
    function = getattr(activations, {"gelu": "gelu_tanh", "geglu": "geglu_tanh"}.get(name, name))
    shapes = (tokens, width), (width,) if bias else None
    for precision in ("fp32", "bf16") if width == 250 else ("fp32",):
        dtype, ulps = DTYPES[precision]
        ulps = 2 * ulps if tokens > 30 else ulps  # the gradient of the bias is a sum over all tokens
        formulas.check(lambda x, b: [function(x, b)], getattr(formulas, name), formulas.draws(*shapes), dtype, ulps)


@pytest.mark.parametrize("name", ["gelu_tanh", "swiglu", "geglu_tanh"])
def test_large_inputs_have_finite_outputs(name):
    x = torch.tensor([[-1e4, 1e4, 1e4, -1e4, 3e4, 3e4]]).requires_grad_()
    out = getattr(activations, name)(x)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
