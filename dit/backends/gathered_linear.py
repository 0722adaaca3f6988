"""A linear layer with its output features split over tensor-parallel ranks, whose output every rank has in full.

It is for what is computed per sample, such as modulations: the output is small, the weight is not.

    forward     c --own rows of W--> own features --gather over TP--> all features
    backward    with sequence parallelism, a rank's gradient of the output covers the tokens of its shard: the sum over
                TP of the own features is the gradient of all tokens (in float32). Without, every rank has it already.

The gradient of the input comes from the own features alone. Without sequence parallelism it is summed here. With it, it
stays as it is: the gradients of replicated parameters are summed over TP at the end of the step (`sequence_shard`).

Shape suffixes: S samples, F own features, D input features, TF all features.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from torch import Tensor, nn

from dit.backends.graph_linears import OfRanks, sent


class GatheredLinear(nn.Linear):
    """y = x W^T + b, see above.

    Args:
        in_features, out_features: of the complete layer.
        group: the tensor-parallel ranks; None for one.
        sequence_parallel: each rank has other tokens of the samples.
        in_graph: inside a compiled layer.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        group: Any,
        sequence_parallel: bool,
        in_graph: bool,
        dtype: torch.dtype,
        device: Any,
    ) -> None:
        self.ranks = OfRanks(group)
        super().__init__(in_features, out_features // self.ranks.size, bias=bias, dtype=dtype, device=device)
        self._group, self._sequence_parallel, self._in_graph = group, sequence_parallel, in_graph

    def forward(self, x_SD: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return super().forward(x_SD)
        if not self._sequence_parallel:
            x_SD = (
                sent(x_SD, "itself", self.ranks)
                if self._in_graph
                else copy_to_tensor_model_parallel_region(x_SD, group=self._group)
            )
        y_SF = super().forward(x_SD)
        if self._in_graph:
            y_FS = y_SF.t()
            if not self._sequence_parallel:
                return sent(y_FS, "gather_for_all", self.ranks).t()
            return sent(y_FS.float(), "gather", self.ranks).t().to(y_SF.dtype)
        if not self._sequence_parallel:
            return gather_from_tensor_model_parallel_region(y_SF, group=self._group)
        return all_gather_last_dim_from_tensor_parallel_region(y_SF.float(), group=self._group).to(y_SF.dtype)
