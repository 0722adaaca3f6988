"""Megatron-Core's parallel linears, which return one value; on one tensor-parallel rank, they are linears of torch."""

from typing import Any, Optional

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from dit.backends.fp8_linear import fp8_linear
from dit.backends.pending_bias import PendingBias
from dit.kernels.fp8 import Fp8Products


class ColumnLinear(ColumnParallelLinear):
    """y = x W^T + b with the output features split over tensor-parallel ranks; gathers the tokens under SP.

    Attributes:
        is_unsharded: whether this rank has all features, so that the layer is a plain torch linear.
        skip_bias_add: whether the output does not include the bias.
        skip_bias_gradient: whether the output includes the bias, whose gradient the next operation computes.
    """

    is_unsharded, returns_bias, skip_bias_add, skip_bias_gradient = False, False, False, False
    fp8: Optional[Fp8Products] = None

    @property
    def compiles(self) -> bool:
        """Whether torch.compile supports the layer; it does not support Megatron-Core's communication."""
        return self.is_unsharded

    def forward(self, x_TD: Tensor) -> Tensor | PendingBias:
        bias = self.bias
        if self.skip_bias_gradient:
            y_TD = _unsharded(self, x_TD, bias.detach())
        elif self.is_unsharded:
            y_TD = _unsharded(self, x_TD, None if self.skip_bias_add else bias)
        else:
            y_TD = super().forward(x_TD)[0]
        if not self.returns_bias:
            return y_TD
        return PendingBias(y_TD, bias if self.skip_bias_add or self.skip_bias_gradient else None)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.fp8 is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        return fp8_linear(
            self.fp8,
            input,
            weight,
            kwargs["bias"],
            group=self.tp_group,
            sequence_parallel=kwargs["sequence_parallel"],
            sum_gradient=kwargs["allreduce_dgrad"],
        )


class RowLinear(RowParallelLinear):
    """y = x W^T + b with the input features split over tensor-parallel ranks; scatters the tokens under SP."""

    is_unsharded, returns_bias, skip_bias_add = False, False, False
    fp8: Optional[Fp8Products] = None

    @property
    def compiles(self) -> bool:
        return self.is_unsharded

    def forward(self, x_TD: Tensor) -> Tensor | PendingBias:
        if self.is_unsharded:
            y_TD = _unsharded(self, x_TD, None if self.skip_bias_add else self.bias)
        else:
            y_TD = self._sharded(x_TD)
        return PendingBias(y_TD, self.bias if self.skip_bias_add else None) if self.returns_bias else y_TD

    def _sharded(self, x_TD: Tensor) -> Tensor:
        """Apply a layer of several tensor-parallel ranks."""
        y_TD: Tensor = super().forward(x_TD)[0]
        return y_TD

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.fp8 is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        return fp8_linear(self.fp8, input, weight, None)  # the caller sums over ranks, then adds the bias


def _unsharded(layer: ColumnLinear | RowLinear, x_TD: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Apply a layer of one tensor-parallel rank."""
    if layer.fp8 is None:
        return nn.functional.linear(x_TD, layer.weight, bias)
    return fp8_linear(layer.fp8, x_TD, layer.weight, bias)
