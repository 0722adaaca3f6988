"""GELU by a sigmoid: values and slopes are those of the formula with a tanh; a backward pass is one product."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dit.kernels.gelu import gelu

POINTS = torch.cat([torch.linspace(-12, 12, 2401, dtype=torch.float64), torch.tensor([-1e4, -60.0, 0.0, 60.0, 1e4])])


def by_formula(x: torch.Tensor) -> torch.Tensor:
    """Hendrycks and Gimpel 2016, section 2."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_value_and_gradient_are_those_of_the_formula(dtype: torch.dtype, error: float) -> None:
    x = POINTS.to(dtype, copy=True).requires_grad_()
    exact = x.detach().to(torch.float64, copy=True).requires_grad_()
    weights = torch.linspace(-1, 2, len(x), dtype=torch.float64)
    value, expected = gelu(x), by_formula(exact)
    torch.testing.assert_close(value.double(), expected, rtol=error, atol=error)
    (value.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=error, atol=error)
    with torch.no_grad():
        assert torch.equal(gelu(x), value)


def test_a_nan_stays_where_it_is() -> None:
    x = torch.tensor([1.0, math.nan, -2.0], requires_grad=True)
    value = gelu(x)
    value.sum().backward()
    assert value.isnan().tolist() == x.grad.isnan().tolist() == [False, True, False]


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_backward_pass_is_one_product_and_saves_one_tensor() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        value = gelu(x)
    assert [t.shape for t in saved] == [x.shape]
    weights = torch.ones_like(x)
    with Ops() as ops:
        torch.autograd.grad(value, x, weights)
    assert [name for name in ops.names if "detach" not in name] == ["aten.mul.Tensor"]
