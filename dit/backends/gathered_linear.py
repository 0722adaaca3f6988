"""A linear layer whose output features are split over tensor-parallel ranks and then gathered on every rank.

It computes per-sample values such as modulations, which have small outputs and large weights.

    forward     c --local rows of W--> local features --gather over TP--> all features
    backward    With sequence parallelism, a rank's gradient of the output covers the tokens of its shard, so the local
                features' gradients are summed over TP (in float32). Without, every rank has the gradient of all tokens.

A rank computes the gradient of the input from its local features only. Without sequence parallelism this gradient is
summed over TP here. With it, the sum follows at the end of the step, as for all replicated parameters
(`sequence_shard`).

Shape suffixes: S samples, F local features, D input features, TF all features.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from torch import Tensor, nn


class GatheredLinear(nn.Linear):
    """y = x W^T + b, described above."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        group: Any,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: Any,
    ) -> None:
        self.ranks = 1 if group is None else group.size()
        super().__init__(in_features, out_features // self.ranks, bias=bias, dtype=dtype, device=device)
        self._group, self._sequence_parallel = group, sequence_parallel
        self.compiles = self.ranks == 1  # see `ColumnLinear.compiles`

    def forward(self, x_SD: Tensor) -> Tensor:
        if self.ranks == 1:
            return super().forward(x_SD)
        if not self._sequence_parallel:
            x_SD = copy_to_tensor_model_parallel_region(x_SD, group=self._group)
        y_SF = super().forward(x_SD)
        if not self._sequence_parallel:
            return gather_from_tensor_model_parallel_region(y_SF, group=self._group)
        return all_gather_last_dim_from_tensor_parallel_region(y_SF.float(), group=self._group).to(y_SF.dtype)
