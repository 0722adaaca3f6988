"""Self-attention and cross-attention with heads split over tensor-parallel ranks."""

from functools import partial
from typing import Optional

import torch
from torch import Tensor, nn

from dit.backends.init import ONES, ZEROS, xavier_uniform
from dit.backends.pending_bias import PendingBias
from dit.backends.provider import LayerProvider
from dit.backends.sharding import Matrices, set_matrices
from dit.kernels.attention import Attention
from dit.kernels.layer_kernels import LayerKernels
from dit.kernels.recompute import recomputable
from dit.kernels.rope import HeadNorm, Heads, Rotation
from dit.layers.adaln import RMSNorm
from dit.layers.pre_hooks import run_pre_hooks
from dit.layout import SequenceLayout

per_head_norm = partial(RMSNorm, gradient_covers="own_heads")
"""RMSNorm over the head size with one weight vector for all heads (QK-layernorm)."""


class WidthRMSNorm(nn.Module):
    """RMSNorm over the full width, i.e. all heads of all tensor-parallel ranks, with a weight per feature.

    Source: Wan Team 2025, arXiv:2503.20314, and its published code (`qk_norm`).
    """

    def __init__(self, num_heads: int, head_size: int, provider: LayerProvider, *, eps: float) -> None:
        super().__init__()
        self.eps, self.width, self.provider = eps, num_heads * head_size, provider
        self.compiles = provider.tp_size == 1  # see `ColumnLinear.compiles`
        self.weight = provider.split_parameter((self.width,), ONES)

    def forward(self, x_TNH: Tensor) -> Tensor:
        x = x_TNH.float()
        square_T11 = self.provider.sum_over_tensor_ranks(x.square().sum((1, 2), keepdim=True))
        normed = x * torch.rsqrt(square_T11 / self.width + self.eps)
        return (normed * self.weight.view(x.shape[1:])).to(x_TNH.dtype)


def qk_norms(
    heads: int,
    groups: int,
    head_size: int,
    provider: LayerProvider,
    *,
    eps: float,
    enabled: bool,
    full_width: bool = False,
) -> tuple[nn.Module, nn.Module]:
    """Return the norms of queries and keys: per head, over the full width, or identities if not `enabled`."""
    if not enabled:
        return nn.Identity(), nn.Identity()
    if full_width:
        return WidthRMSNorm(heads, head_size, provider, eps=eps), WidthRMSNorm(groups, head_size, provider, eps=eps)
    return per_head_norm(head_size, provider, eps=eps), per_head_norm(head_size, provider, eps=eps)


def head_norm(norms: tuple[nn.Module, nn.Module], heads: Heads) -> Optional[HeadNorm]:
    """Return the norms per head in the form of the kernels; None for identities."""
    if not isinstance(norms[1], RMSNorm):
        return None
    run_pre_hooks(*norms)
    weight_q, weight_k = (norm.get_parameter("weight") for norm in norms)
    return HeadNorm(weight_q if heads.queries else None, weight_k if heads.keys else None, norms[1].eps)


def head_matrices(heads: Heads, head_size: int) -> Matrices:
    """Return queries, keys and values as matrices of a projection that is ordered by group."""
    return Matrices(tuple((count * head_size, 1) for count in heads.parts if count))


ONE_HEAD = Heads(1, keys=False, values=False)
"""Groups of one head, for a tensor with only queries or only keys."""


def split_heads(
    kernels: LayerKernels,
    projection: PendingBias,
    groups: int,
    heads: Heads,
    norms: tuple[nn.Module, nn.Module],
    rotation: Optional[Rotation] = None,
) -> list[Tensor]:
    """Split a projection into its queries, keys and values; normalise and rotate queries and keys.

    Args:
        projection: output of `LayerProvider.heads_linear`.
        groups: local groups of heads.
        norms: norms of queries and of keys, from `qk_norms`; identities for none.
    """
    x_TF, bias = projection
    if not isinstance(norms[1], WidthRMSNorm):
        return kernels.split_heads(x_TF, groups, heads, head_norm(norms, heads), rotation, bias)
    parts = kernels.split_heads(x_TF, groups, heads, bias=bias)
    present = [norm for norm, has in zip(norms, (heads.queries, heads.keys)) if has]
    for i, norm in enumerate(present):  # full-width norms may need sums over several ranks, so they are not fused
        parts[i] = norm(parts[i])
        if rotation is not None:
            (parts[i],) = kernels.split_heads(parts[i], parts[i].shape[1], ONE_HEAD, rotation=rotation)
    return parts


@recomputable
def _mix(v_TGH: Tensor, first_TGH: Tensor, weight_1: Tensor) -> Tensor:
    return torch.lerp(v_TGH, first_TGH, weight_1)


class SelfAttention(nn.Module):
    """Bidirectional multi-head self-attention inside each sample of the pack.

    The output features of the fused projection are ordered by group, so that every tensor-parallel rank has complete
    groups. With 2 query heads per group (1 without grouped-query attention):

        | q0 q1 k0 v0 | q2 q3 k1 v1 | ...
          group 0       group 1

    Args:
        num_heads: attention heads on all ranks.
        num_query_groups: key and value heads; num_heads / num_query_groups query heads share one (grouped-query
            attention, Ainslie et al. 2023, arXiv:2305.13245). Default: `num_heads`.
        qkv_bias: whether the projection to queries, keys and values has a bias. Default: `bias`.
        qk_layernorm: normalise queries and keys per head.
        norm_full_width: normalise them over the full width instead. Megatron-Core's `qk_layernorm` must then be False,
            because these weights are split over ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        provider: LayerProvider,
        attention: Attention,
        *,
        num_query_groups: Optional[int] = None,
        bias: bool = True,
        qkv_bias: Optional[bool] = None,
        qk_layernorm: bool = False,
        norm_full_width: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.attention, self.kernels = attention, provider.kernels
        groups = num_heads if num_query_groups is None else num_query_groups
        provider.split(num_heads, "num_attention_heads")
        self.local_groups = provider.split(groups, "num_query_groups")
        self.heads = Heads(num_heads // groups)
        head_size = hidden_size // num_heads
        rows = hidden_size + 2 * groups * head_size
        self.linear_qkv = provider.heads_linear(
            hidden_size, rows, bias=bias if qkv_bias is None else qkv_bias, init=xavier_uniform(hidden_size, rows)
        )
        set_matrices(self.linear_qkv, head_matrices(self.heads, head_size))
        self.linear_proj = provider.row_linear(
            hidden_size, hidden_size, bias=bias, init=xavier_uniform(hidden_size, hidden_size), returns_bias=True
        )
        self.q_layernorm, self.k_layernorm = qk_norms(
            num_heads, groups, head_size, provider, eps=eps, enabled=qk_layernorm, full_width=norm_full_width
        )

    def forward(
        self,
        x_TD: Tensor,
        layout: SequenceLayout,
        rotation: Optional[Rotation] = None,
        *,
        attend: Optional[Attention] = None,
        first: Optional[tuple[Tensor, Tensor]] = None,
        returns_values: bool = False,
    ) -> PendingBias | tuple[PendingBias, Tensor]:
        """Attend inside each sample.

        Args:
            rotation: rotary positions of the gathered tokens (all tensor-parallel ranks), or None.
            attend: attention within segments smaller than samples. Default: the implementation of this process.
            first: values v_1 of the first layer, of local heads and gathered tokens, and a learned weight w: this layer
                uses w v_1 + (1 - w) v (ResFormer, Zhou et al. 2024, arXiv:2410.17897; one w per layer: SR-DiT, Bhanded
                2025, arXiv:2512.12386).
            returns_values: return the values of this layer, too.
        """
        norms = self.q_layernorm, self.k_layernorm
        q, k, v = split_heads(self.kernels, self.linear_qkv(x_TD), self.local_groups, self.heads, norms, rotation)
        if first is not None:
            v = _mix(v, *first)
        y: PendingBias = self.linear_proj((attend or self.attention)(q, k, v, layout, layout).flatten(1))
        return (y, v) if returns_values else y


class CrossAttention(nn.Module):
    """Tokens attend to the real text tokens of their sample.

    The text is replicated over all ranks even under sequence and context parallelism, because it is short and the
    queries of every rank need all of it. The key and value projection is split over tensor-parallel ranks by groups.

    Args:
        context_size: width of the text embeddings.
        num_heads, num_query_groups, qk_layernorm, norm_full_width: as in `SelfAttention`.
        zero_output: zero-initialise the output projection, for a residual without gate (PixArt-alpha, Chen et al. 2023,
            section 2.3).
        attention: the attention implementation of this process; replicated keys need no communication.
    """

    def __init__(
        self,
        hidden_size: int,
        context_size: int,
        num_heads: int,
        provider: LayerProvider,
        attention: Attention,
        *,
        num_query_groups: Optional[int] = None,
        bias: bool = True,
        qk_layernorm: bool = False,
        norm_full_width: bool = False,
        zero_output: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.attention, self.kernels = attention, provider.kernels
        groups = num_heads if num_query_groups is None else num_query_groups
        self.local_heads = provider.split(num_heads, "num_cross_attention_heads")
        self.local_groups = provider.split(groups, "num_query_groups")
        head_size = hidden_size // num_heads
        square, rows = xavier_uniform(hidden_size, hidden_size), 2 * groups * head_size
        self.linear_q = provider.heads_linear(hidden_size, hidden_size, bias=bias, init=square)
        self.linear_kv = provider.heads_linear(
            context_size, rows, bias=bias, init=xavier_uniform(context_size, rows), replicated_input=True
        )
        set_matrices(self.linear_kv, head_matrices(Heads(0), head_size))
        self.linear_proj = provider.row_linear(
            hidden_size, hidden_size, bias=bias, init=ZEROS if zero_output else square, returns_bias=True
        )
        self.q_layernorm, self.k_layernorm = qk_norms(
            num_heads, groups, head_size, provider, eps=eps, enabled=qk_layernorm, full_width=norm_full_width
        )

    def forward(
        self, x_TD: Tensor, context_KD: Tensor, layout: SequenceLayout, context_layout: SequenceLayout
    ) -> PendingBias:
        norms = self.q_layernorm, self.k_layernorm
        (q,) = split_heads(self.kernels, self.linear_q(x_TD), self.local_heads, ONE_HEAD, norms)
        k, v = split_heads(self.kernels, self.linear_kv(context_KD), self.local_groups, Heads(0), norms)
        return self.linear_proj(self.attention(q, k, v, layout, context_layout).flatten(1))
