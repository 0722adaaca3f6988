"""The norm of many gradients at once, where Megatron-Core has neither Transformer Engine nor Apex for it.

Its own fallback copies one number to the host for every parameter, which on a GPU is as many waits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor


def l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
) -> tuple[Tensor, None]:
    """Return the norm of all tensors together, `[1]`; the other arguments are those of Apex, and not read."""
    tensors = [tensor for tensors in tensor_lists for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))).view(1), None


def install() -> None:
    """Let gradient norms use it in place of the fallback, in this process."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
