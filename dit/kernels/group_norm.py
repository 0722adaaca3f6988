"""Group norm of pictures with optional scale, shift and SiLU: the reference of `dit.kernels.fused.group_norm`.

    x --> norm over the positions and channels of a group --> weight, bias --> [1 + scale, shift] --> [SiLU]

Source: Wu and He 2018, arXiv:1803.08494; scale and shift, Dhariwal and Nichol 2021, arXiv:2105.05233, section 3.1.
"""

from dataclasses import dataclass
from typing import Optional

from torch import Tensor
from torch.nn.functional import group_norm, silu


@dataclass(frozen=True)
class Groups:
    """Parameters of a group norm.

    Attributes:
        weight, bias: affine parameters `[C]`; the norm is computed in their dtype.
    """

    weight: Tensor
    bias: Tensor
    count: int
    eps: float


def norm_groups(
    x_NCHW: Tensor,
    groups: Groups,
    scale_NC: Optional[Tensor] = None,
    shift_NC: Optional[Tensor] = None,
    *,
    activate: bool = False,
) -> Tensor:
    """Return SiLU(norm(x) * (1 + scale) + shift) in the dtype of `x_NCHW`."""
    weight, bias = groups.weight, groups.bias
    y_NCHW = group_norm(x_NCHW.to(weight.dtype), groups.count, weight, bias, groups.eps).to(x_NCHW.dtype)
    if scale_NC is not None and shift_NC is not None:
        y_NCHW = y_NCHW * (1 + scale_NC[:, :, None, None]) + shift_NC[:, :, None, None]
    return silu(y_NCHW) if activate else y_NCHW
