"""Addition of bf16 or fp16 gradients to the fp32 main gradients of many parameters by one kernel.

torch's multi-tensor addition needs one dtype; it adds gradients of another dtype by one kernel per parameter.

Source: `can_use_fast_route` in ATen/native/ForeachUtils.h of torch 2.13.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dit.kernels.fused.adamw import by_alignment, tables


@torch.library.custom_op("dit::add_gradients", mutates_args=("mains",))
def _add(mains: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    from dit.kernels.fused.gpu import gradients as gpu

    half = gradients[0].dtype == torch.float16
    rows = [(g.data_ptr(), m.data_ptr(), g.numel()) for g, m in zip(gradients, mains, strict=True)]
    for aligned, group in by_alignment(rows):
        gpu.add_gradients(*tables(group, gpu.CHUNK, mains[0].device), half=half, aligned=aligned)


@_add.register_fake
def _(mains, gradients):  # type: ignore[no-untyped-def]
    return None


def add_gradients(mains: list[Tensor], gradients: list[Tensor]) -> None:
    """Add each gradient to its main gradient in place, as `torch._foreach_add_` does."""
    halves = {gradient.dtype for gradient in gradients} in ({torch.bfloat16}, {torch.float16})
    if halves and all(g.is_contiguous() for g in gradients) and len({m.data_ptr() for m in mains}) == len(mains):
        _add(mains, gradients)
    else:
        torch._foreach_add_(mains, gradients)
