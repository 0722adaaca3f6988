"""Self-attention with heads split over tensor-parallel ranks."""

from torch import Tensor, nn

from dit.backends.addressed_init import ONES, xavier_uniform
from dit.backends.attention import Attention
from dit.backends.provider import LayerProvider
from dit.batch import SequenceLayout


class HeadRMSNorm(nn.Module):
    """RMSNorm over the head size, one weight vector shared by all heads (QK-layernorm)."""

    def __init__(self, head_size: int, provider: LayerProvider, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        # Each tensor-parallel rank sees its own heads only; Megatron-Core sums this gradient over them by the
        # parameter's name (q_layernorm, k_layernorm) when its config says `qk_layernorm`.
        self.weight = provider.parameter((head_size,), ONES)

    def forward(self, x_TNH: Tensor) -> Tensor:
        return nn.functional.rms_norm(x_TNH, x_TNH.shape[-1:], self.weight, self.eps)


class SelfAttention(nn.Module):
    """Bidirectional multi-head self-attention inside each sample of the pack.

    The fused projection holds its output rows head by head (q, k, v of head 0, then of head 1, ...), so that splitting
    them over tensor-parallel ranks keeps heads whole.

    Args:
        hidden_size: width of the tokens.
        num_heads: attention heads of the whole model.
        bias: whether the projections have biases.
        qk_layernorm: normalise queries and keys per head.
        attention: the attention path of this process.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        provider: LayerProvider,
        attention: Attention,
        *,
        bias: bool = True,
        qk_layernorm: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.local_heads = provider.split(num_heads, "num_attention_heads")
        head_size = hidden_size // num_heads
        self.linear_qkv = provider.column_linear(
            hidden_size, 3 * hidden_size, bias=bias, init=xavier_uniform(hidden_size, 3 * hidden_size)
        )
        self.linear_proj = provider.row_linear(
            hidden_size, hidden_size, bias=bias, init=xavier_uniform(hidden_size, hidden_size)
        )
        self.q_layernorm = HeadRMSNorm(head_size, provider, eps=eps) if qk_layernorm else nn.Identity()
        self.k_layernorm = HeadRMSNorm(head_size, provider, eps=eps) if qk_layernorm else nn.Identity()

    def forward(self, x_TD: Tensor, layout: SequenceLayout) -> Tensor:
        q, k, v = self.linear_qkv(x_TD).unflatten(-1, (self.local_heads, 3, -1)).unbind(2)
        out_TNH = self.attention(self.q_layernorm(q), self.k_layernorm(k), v, layout, layout)
        return self.linear_proj(out_TNH.flatten(1))
