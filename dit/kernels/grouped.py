"""One linear layer of all experts as one matrix product: each group of rows is multiplied by its own matrix.

    rows      | 0 1 2 | 3 | 4 5 6 7 |         ends (3, 4, 8)
    matrix       W0    W1      W2

torch's grouped product computes it in one kernel. It needs bf16 and sizes that are multiples of 8 on a GPU, and bf16 or
fp32 on a CPU; other products are computed one group after the other.

Shape suffixes: P rows, E groups, K input features, N output features.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from torch.utils.flop_counter import register_flop_formula

from dit.kernels.fused.operators import operator

ONES = 8
"""Columns of ones in the product that sums rows; a grouped product needs a multiple of 8."""


@operator("grouped_product", lambda x, matrices, _: x.new_empty(x.shape[0], matrices.shape[2]))
def grouped_product(x_PK: Tensor, matrices_EKN: Tensor, ends_E: Tensor) -> Tensor:
    """Return each group of rows times its matrix, `[P, N]`.

    Args:
        ends_E: index of the row after the last one of each group, int32.
    """
    if _is_supported(x_PK, x_PK.shape[1], matrices_EKN.shape[2]):
        return grouped_mm(x_PK, matrices_EKN, offs=ends_E)
    groups = zip(x_PK.split(_sizes(ends_E)), matrices_EKN, strict=True)
    return torch.cat([rows @ matrix for rows, matrix in groups])


@operator("grouped_gradient", lambda grad, x, ends: x.new_empty(ends.shape[0], grad.shape[1], x.shape[1]))
def grouped_gradient(grad_PN: Tensor, x_PK: Tensor, ends_E: Tensor) -> Tensor:
    """Return the gradient of the transposed matrices, `[E, N, K]`: sums over the rows of each group."""
    if _is_supported(x_PK, x_PK.shape[1], grad_PN.shape[1]):
        return grouped_mm(grad_PN.mT, x_PK, offs=ends_E)
    sizes = _sizes(ends_E)
    return torch.stack([grad.mT @ rows for grad, rows in zip(grad_PN.split(sizes), x_PK.split(sizes), strict=True)])


@operator("grouped_sums", lambda x, ends: x.new_empty(ends.shape[0], x.shape[1]))
def grouped_sums(x_PN: Tensor, ends_E: Tensor) -> Tensor:
    """Sum the rows of each group, `[E, N]`: their product with ones."""
    return grouped_gradient(x_PN, x_PN.new_ones(len(x_PN), ONES), ends_E)[..., 0].contiguous()


@register_flop_formula([torch.ops.dit.grouped_product, torch.ops.dit.grouped_gradient])
def _flops(a: Sequence[int], b: Sequence[int], *_: object, **__: object) -> int:
    """A group has part of the rows, so the products of all groups are as large as one of all rows."""
    rows, columns = a
    return 2 * rows * columns * b[-1]


def _is_supported(x: Tensor, *sizes: int) -> bool:
    if x.device.type == "cpu":
        return x.dtype in (torch.float32, torch.bfloat16)
    return x.dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes)


def _sizes(ends_E: Tensor) -> list[int]:
    ends = ends_E.tolist()
    return [end - start for start, end in zip([0, *ends], ends)]


class _GroupedLinear(torch.autograd.Function):
    """Saves the weights, not their stacked copy; the backward pass stacks them again."""

    @staticmethod
    def forward(ctx: Any, x_PK: Tensor, counts: Sequence[int], ends_E: Tensor, *parameters: Tensor) -> Tensor:
        count, ctx.counts = len(counts), counts
        ctx.save_for_backward(x_PK, ends_E, *parameters[:count])
        ctx.has_bias = len(parameters) > count
        y_PN = grouped_product(x_PK, torch.stack(parameters[:count]).mT, ends_E)
        if ctx.has_bias:
            group_P = torch.searchsorted(ends_E, torch.arange(len(x_PK), device=x_PK.device), right=True)
            y_PN += torch.stack(parameters[count:])[group_P]
        return y_PN

    @staticmethod
    def backward(ctx: Any, grad_PN: Tensor) -> tuple[Optional[Tensor], ...]:
        x_PK, ends_E, *weights = ctx.saved_tensors
        grad_PN = grad_PN.contiguous()
        grad_x = grouped_product(grad_PN, torch.stack(weights), ends_E) if ctx.needs_input_grad[0] else None
        gradients = list(grouped_gradient(grad_PN, x_PK, ends_E))
        if ctx.has_bias:
            gradients += grouped_sums(grad_PN, ends_E)
        for i, grad in enumerate(gradients):
            if ctx.counts[i % len(weights)] == 0:  # uninitialised on SM 100 (pytorch/pytorch#172439)
                grad.zero_()
        return grad_x, None, None, *gradients


def grouped_linear(
    x_PK: Tensor,
    counts: Sequence[int],
    ends_E: Tensor,
    weights: Sequence[Tensor],
    biases: Optional[Sequence[Tensor]],
) -> Tensor:
    """Compute x W^T + b with the weight `[N, K]` and the bias `[N]` of each group of rows.

    Args:
        counts: rows of each group, on the host.
        ends_E: index of the row after the last one of each group, int32, on the device.
    """
    y_PN: Tensor = _GroupedLinear.apply(x_PK, counts, ends_E, *weights, *(biases or ()))
    return y_PN
