"""Mixture-of-experts feed-forward sub-layer, with the experts split over expert-parallel ranks.

Shape suffixes: T local tokens, S samples, E experts, P tokens of one expert, D hidden size.
"""

from collections import deque
from typing import Literal, Optional, cast

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from dit.backends.init import normal, xavier_uniform
from dit.backends.provider import LayerProvider
from dit.backends.sharding import set_matrices
from dit.kernels.grouped import grouped_linear
from dit.kernels.recompute import first_run
from dit.layers.mlp import GATED
from dit.layers.pre_hooks import run_pre_hooks
from dit.layers.routing import balancing_loss, select_experts, select_tokens
from dit.layout import SequenceLayout, to_device


class Expert(nn.Module):
    """The dense `MLP`, or `SwiGLU` if `gated`, without tensor parallelism."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, provider: LayerProvider, *, bias: bool, gated: bool
    ) -> None:
        super().__init__()
        init = xavier_uniform(hidden_size, ffn_hidden_size)
        self.activation = provider.kernels.swiglu if gated else provider.kernels.gelu_tanh
        width = 2 * ffn_hidden_size if gated else ffn_hidden_size
        self.linear_fc1 = provider.expert_linear(hidden_size, width, bias=bias, init=init)
        if gated:
            set_matrices(self.linear_fc1, GATED)
        self.linear_fc2 = provider.expert_linear(ffn_hidden_size, hidden_size, bias=bias, init=init)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x_TD), None))


class Experts(nn.ModuleDict):
    """The local experts, named by global index, so that a name refers to the same expert under every layout."""

    def forward(self, tokens_PD: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert to its tokens.

        Args:
            counts: tokens of each expert, in the order of the tokens; on the host.
        """
        experts = [cast("Expert", expert) for expert in self.values()]
        if any(layer._forward_hooks for layer in self.modules()):  # such as adapters
            return torch.cat([e(tokens) for e, tokens in zip(experts, tokens_PD.split(counts.tolist()), strict=True)])
        run_pre_hooks(*list(self.modules())[1:])  # of the linear layers, which grouped products replace
        ends = to_device(counts.cumsum(0).to(torch.int32), tokens_PD.device)
        rows = counts.tolist(), ends
        inner_PF = experts[0].activation(_linears(tokens_PD, *rows, [e.linear_fc1 for e in experts]), None)
        return _linears(inner_PF, *rows, [e.linear_fc2 for e in experts])


def _linears(x: Tensor, counts: list[int], ends: Tensor, layers: list[nn.Linear]) -> Tensor:
    biases = [layer.bias for layer in layers] if layers[0].bias is not None else None
    return grouped_linear(x, counts, ends, [layer.weight for layer in layers], biases)


class MoE(nn.Module):
    """y_t = sum of score_te * Expert_e(x_t) over the experts e selected for token t; scores = softmax over experts.

    `expert_choice`: each expert takes the ceil(n_s x capacity factor / E) tokens of each sample s with the highest
    scores. The load is even without an auxiliary loss, and a token may be routed to several experts or to none.
    `top_k`: each token takes the k experts with the highest scores; no token is dropped, and a balancing loss is added.

    Routing is per sample, as in EC-DiT, so it does not depend on the other samples of the pack or on the data-parallel
    size. If the tokens of a sample are split over ranks, their scores are gathered first. Padding is never selected.
    Scores are float32 and not renormalised over the selected experts.

        scores_TE --select--> selected_TE --dispatch--> tokens of each expert --experts--> combine --> y_TD

    Args:
        capacity_factor: mean number of experts per token (`expert_choice`).
        top_k: experts of every token (`top_k`).
        aux_loss_coeff: weight of the balancing loss relative to the main loss (`top_k`).
        gated: whether the experts are `SwiGLU` instead of `MLP`.

    Source: Sun et al. 2024, arXiv:2410.02098 (EC-DiT); Zhou et al. 2022, arXiv:2202.09368 (expert choice); Fedus et al.
    2021, arXiv:2101.03961 (top-k and its loss). Deviations: the capacity is rounded up to an integer, and every
    layer has experts.
    """

    compiles = False
    """torch.compile does not support numbers of tokens that depend on data; see `dit.kernels.compiled`."""

    def __init__(
        self,
        hidden_size: int,
        provider: LayerProvider,
        *,
        ffn_hidden_size: int,
        num_experts: int,
        router: Literal["expert_choice", "top_k"],
        capacity_factor: float,
        top_k: int,
        aux_loss_coeff: float,
        bias: bool = True,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.provider, self.routing = provider, router
        self.capacity_factor, self.top_k, self.aux_loss_coeff = capacity_factor, top_k, aux_loss_coeff
        local_experts = provider.local_experts(num_experts)
        self.router = provider.replicated_linear(hidden_size, num_experts, bias=False, init=normal(0.02))
        self.experts = Experts(
            {str(i): Expert(hidden_size, ffn_hidden_size, provider, bias=bias, gated=gated) for i in local_experts}
        )
        self.dispatch = provider.expert_dispatch(local_experts)
        self.load = ExpertLoad(num_experts)

    def forward(self, x_TD: Tensor, layout: SequenceLayout) -> Tensor:
        run_pre_hooks(self.router)
        scores_TE = nn.functional.linear(x_TD.float(), self.router.weight.float()).softmax(-1)
        if self.routing == "expert_choice":
            selected_TE = self._expert_choice(scores_TE, layout)
        else:
            selected_TE = select_experts(scores_TE, layout.valid_T, self.top_k)
        assert self.dispatch is not None, "a model on the meta device cannot run"
        tokens_PD, weights_P, counts = self.dispatch.send(x_TD, selected_TE, scores_TE)
        y_PD = self.experts(tokens_PD, counts) * weights_P[:, None]
        y_TD = self.dispatch.collect(y_PD.to(x_TD.dtype))
        aux_loss = None
        if self.routing == "top_k":
            counts_SE = self.provider.sum_over_sample_ranks(layout.sum_per_sample(selected_TE.float()))
            aux_loss = balancing_loss(scores_TE, counts_SE, layout, self.top_k)
            # The main loss does not include the balancing loss; this adds its gradient in the backward pass.
            y_TD = MoEAuxLossAutoScaler.apply(y_TD, self.aux_loss_coeff * aux_loss)
        if torch.is_grad_enabled() and first_run():
            self.load.count(selected_TE, layout.valid_T, aux_loss)
        return y_TD

    def _expert_choice(self, scores_TE: Tensor, layout: SequenceLayout) -> Tensor:
        """Select among all tokens of each sample; return the selection of the local tokens, bool `[T, E]`."""
        if layout.local_indices is None:
            return select_tokens(scores_TE, layout, self.capacity_factor)
        # Each token is local to exactly one of the ranks that split the sample, so this sum is a gather.
        all_TE = scores_TE.new_zeros(layout.total_tokens, scores_TE.shape[1])
        all_TE = self.provider.sum_over_sample_ranks(all_TE.index_copy(0, layout.local_indices, scores_TE.detach()))
        return select_tokens(all_TE, layout, self.capacity_factor)[layout.local_indices]


class ExpertLoad:
    """The load of a layer's experts on this rank since the last `take`, counted on the device during training."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._counts: Optional[Tensor] = None
        self._before: deque[Optional[Tensor]] = deque(maxlen=2)  # the counts before the newest steps

    @torch.no_grad()
    def count(self, selected_TE: Tensor, valid_T: Tensor, aux_loss: Optional[Tensor]) -> None:
        """Add one forward pass.

        Args:
            aux_loss: this rank's part of the token-weighted balancing loss, or None.
        """
        unrouted = valid_T & ~selected_TE.any(-1)
        counts = torch.zeros(self.num_experts + 3, dtype=torch.float64, device=selected_TE.device)
        counts[:-3] = selected_TE.sum(0)
        counts[-3], counts[-2] = valid_T.sum(), unrouted.sum()
        if aux_loss is not None:
            counts[-1] = aux_loss
        self._counts = counts if self._counts is None else self._counts + counts

    def begin_step(self) -> None:
        """Store a reference to the counts before a step, for `drop_step`."""
        self._before.append(self._counts)

    def drop_step(self, steps: int = 1) -> None:
        """Restore the counts before the newest step, or before the newest two, because they are not applied."""
        self._counts = self._before[-steps]

    def take(self, device: torch.device) -> Tensor:
        """Return and reset the counts `[E + 3]`: tokens by expert, real tokens, unrouted tokens, sum of the loss."""
        counts, self._counts = self._counts, None
        return torch.zeros(self.num_experts + 3, dtype=torch.float64, device=device) if counts is None else counts
