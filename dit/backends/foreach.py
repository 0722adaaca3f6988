"""Norms and scaling of many gradients at once, where Megatron-Core has neither Transformer Engine nor Apex for it.

Its own fallbacks copy one number to the host for every parameter, which on a GPU is as many waits, and scale by a new
tensor and a copy of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor


def l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
) -> tuple[Tensor, None]:
    """Return the norm of all tensors together, `[1]`; the other arguments are those of Apex, and not read."""
    tensors = [tensor for tensors in tensor_lists for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))).view(1), None


def scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Multiply the first list by a factor into the second one, which Megatron-Core gives as the same."""
    sources, targets = tensor_lists
    if all(source is target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_mul_(list(targets), factor)
    else:
        local_multi_tensor_scale(chunk_size, noop_flag, tensor_lists, factor)


def install() -> None:
    """Let gradient norms and clipping use these in place of the fallbacks, in this process."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale
