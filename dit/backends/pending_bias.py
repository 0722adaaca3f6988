"""The output of a linear layer whose bias the next operation adds."""

from collections.abc import Callable
from typing import NamedTuple, Optional

from torch import Tensor


class PendingBias(NamedTuple):
    """Output of a linear layer with `returns_bias`, and its bias, as Megatron-Core's linears return them.

    The operation after the linear (a gated residual, an activation) adds the bias in its own pass over memory.

    Attributes:
        y: the output.
        bias: the bias that the next operation has to add; None if there is none, or `y` includes it. With
            `skip_bias_gradient`, `y` includes it, and the next operation only computes its gradient.
    """

    y: Tensor
    bias: Optional[Tensor] = None

    @classmethod
    def of(cls, output: "Tensor | PendingBias") -> "PendingBias":
        """Return the output of any layer as a pair."""
        return cls(output) if isinstance(output, Tensor) else output

    def added(self) -> Tensor:
        return self.y if self.bias is None else self.y + self.bias

    def map(self, function: Callable[[Tensor], Tensor]) -> "PendingBias":
        """Apply a function that moves tokens."""
        return PendingBias(function(self.y), self.bias)

    def __add__(self, other: "Tensor | PendingBias") -> "PendingBias":  # type: ignore[override]
        other = PendingBias.of(other)
        if self.bias is None or other.bias is None:
            return PendingBias(self.y + other.y, other.bias if self.bias is None else self.bias)
        return PendingBias(self.y + other.y, self.bias + other.bias)
