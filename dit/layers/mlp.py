"""The feed-forward sub-layer, its inner width split over tensor-parallel ranks."""

from torch import Tensor, nn

from dit.backends.addressed_init import xavier_uniform
from dit.backends.provider import LayerProvider


class MLP(nn.Module):
    """Linear, tanh-GELU, Linear (DiT)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, provider: LayerProvider, *, bias: bool = True) -> None:
        super().__init__()
        init = xavier_uniform(hidden_size, ffn_hidden_size)
        self.linear_fc1 = provider.column_linear(hidden_size, ffn_hidden_size, bias=bias, init=init)
        self.linear_fc2 = provider.row_linear(ffn_hidden_size, hidden_size, bias=bias, init=init)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.linear_fc2(nn.functional.gelu(self.linear_fc1(x_TD), approximate="tanh"))
