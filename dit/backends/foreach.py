"""Gradient norm of many tensors in one call, for use without Transformer Engine and Apex.

Megatron-Core's fallback copies one number per parameter to the host, which on a GPU is one synchronisation each.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor

from dit.patches import patches


def l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
) -> tuple[Tensor, None]:
    """Return the norm of all tensors together, `[1]`; the other arguments belong to Apex's signature and are unused."""
    tensors = [tensor for tensors in tensor_lists for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))).view(1), None


@patches(
    "megatron-core 0.16",
    "core/optimizer/clip_grads.py: l2_norm_impl",
    why="the fallback copies one number per parameter to the host",
)
def install() -> None:
    """Replace Megatron-Core's fallback in this process."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
