"""The feed-forward sub-layer as a mixture of experts, the experts shared by expert-parallel ranks."""

from typing import Literal, Optional

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from dit.backends.init import normal, xavier_uniform
from dit.backends.provider import LayerProvider
from dit.kernels.modulation import gelu_tanh, swiglu
from dit.kernels.recompute import first_run
from dit.layers.routing import balancing_loss, choose_experts, choose_tokens
from dit.layout import SequenceLayout


class Expert(nn.Module):
    """The dense `MLP`, or `SwiGLU` where `gated`, whole on one rank."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, provider: LayerProvider, *, bias: bool, gated: bool
    ) -> None:
        super().__init__()
        init = xavier_uniform(hidden_size, ffn_hidden_size)
        self.activation = swiglu if gated else gelu_tanh
        width = 2 * ffn_hidden_size if gated else ffn_hidden_size
        self.linear_fc1 = provider.expert_linear(hidden_size, width, bias=bias, init=init)
        self.linear_fc2 = provider.expert_linear(ffn_hidden_size, hidden_size, bias=bias, init=init)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x_TD)))


class MoE(nn.Module):
    """y_t = sum of score_te * Expert_e(x_t) over the experts e that go with token t; scores = softmax over experts.

    `expert_choice`: each expert takes the ceil(n_s x capacity factor / E) best tokens of each sample s. Every expert is
    equally full without an auxiliary loss, and a token may meet several experts or none: detail gets more computation.
    `top_k`: each token takes its k best experts, none is dropped, and a balancing loss per sample is added.

    Routing stays inside the sample, so it is the same alone and in any pack, at any data-parallel size, and for a
    sample whose tokens lie on several ranks (their scores are gathered first). EC-DiT also routes within one image.
    Padding rows are never chosen. Scores are float32 and not renormalised over the chosen experts.

    Args:
        hidden_size: width of the tokens.
        ffn_hidden_size: inner width of each expert.
        num_experts: of the whole layer; a multiple of the expert-parallel size.
        router: who chooses.
        capacity_factor: experts that a token meets on average (`expert_choice`).
        top_k: experts that every token meets (`top_k`).
        aux_loss_coeff: weight of the balancing loss beside the main loss (`top_k`).
        gated: experts are SwiGLU.

    Source: Sun et al. 2024, arXiv:2410.02098 (EC-DiT); Zhou et al. 2022, arXiv:2202.09368 (expert choice); Fedus et al.
    2021, arXiv:2101.03961 (top-k and its loss). Deviations: the capacity is rounded up where it is not whole, and every
    layer has experts.
    """

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
        mine = provider.local_experts(num_experts)
        self.router = provider.replicated_linear(hidden_size, num_experts, bias=False, init=normal(0.02))
        # Named by their global index, so that a name means the same expert on every layout.
        self.experts = nn.ModuleDict(
            {str(i): Expert(hidden_size, ffn_hidden_size, provider, bias=bias, gated=gated) for i in mine}
        )
        self.dispatch = provider.expert_dispatch(mine)
        self.load = ExpertLoad(num_experts)

    def forward(self, x_TD: Tensor, layout: SequenceLayout) -> Tensor:
        """Send the rows held here through the experts.

        Args:
            x_TD: rows held here.
            layout: of these rows.
        """
        scores_TE = nn.functional.linear(x_TD.float(), self.router.weight.float()).softmax(-1)
        if self.routing == "expert_choice":
            chosen_TE = self._experts_choose(scores_TE, layout)
        else:
            chosen_TE = choose_experts(scores_TE, layout.valid_T, self.top_k)
        assert self.dispatch is not None, "a model on the meta device is counted, not run"
        tokens, weights = self.dispatch.send(x_TD, chosen_TE, scores_TE)
        outputs = [
            (expert(tokens_PD) * weights_P[:, None]).to(x_TD.dtype)
            for expert, tokens_PD, weights_P in zip(self.experts.values(), tokens, weights, strict=True)
        ]
        y_TD = self.dispatch.collect(torch.cat(outputs))
        aux_loss = None
        if self.routing == "top_k":
            taken_SE = self.provider.sum_over_sample_ranks(layout.sum_per_sample(chosen_TE.float()))
            aux_loss = balancing_loss(scores_TE, taken_SE, layout, self.top_k)
            # The loss function stays unaware: this adds the gradient on the way back, at the main loss's scale.
            y_TD = MoEAuxLossAutoScaler.apply(y_TD, self.aux_loss_coeff * aux_loss)
        if torch.is_grad_enabled() and first_run():
            self.load.count(chosen_TE, layout.valid_T, aux_loss)
        return y_TD

    def _experts_choose(self, scores_TE: Tensor, layout: SequenceLayout) -> Tensor:
        """Choose among all tokens of each sample; return what concerns the rows held here."""
        if layout.rows is None:
            return choose_tokens(scores_TE, layout, self.capacity_factor)
        # Every row lies on one of the ranks that share the sample, so their sum is a gather, whatever the order.
        all_TE = scores_TE.new_zeros(layout.total_tokens, scores_TE.shape[1])
        all_TE = self.provider.sum_over_sample_ranks(all_TE.index_copy(0, layout.rows, scores_TE.detach()))
        return choose_tokens(all_TE, layout, self.capacity_factor)[layout.rows]


class ExpertLoad:
    """What a layer's experts were given on this rank since the last `take`, counted on the device while training.

    Args:
        num_experts: of the whole layer.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._counts: Optional[Tensor] = None

    @torch.no_grad()
    def count(self, chosen_TE: Tensor, valid_T: Tensor, aux_loss: Optional[Tensor]) -> None:
        """Add one forward pass.

        Args:
            chosen_TE: which experts take which of the rows held here.
            valid_T: real tokens among them.
            aux_loss: this rank's part of the token-weighted balancing loss, if there is one.
        """
        never = valid_T & ~chosen_TE.any(-1)
        counts = torch.zeros(self.num_experts + 3, dtype=torch.float64, device=chosen_TE.device)
        counts[:-3] = chosen_TE.sum(0)
        counts[-3], counts[-2] = valid_T.sum(), never.sum()
        if aux_loss is not None:
            counts[-1] = aux_loss
        self._counts = counts if self._counts is None else self._counts + counts

    def take(self, device: torch.device) -> Tensor:
        """Return the counts and start again: `[E + 3]` tokens by expert, real tokens, those never chosen, loss sum."""
        counts, self._counts = self._counts, None
        return torch.zeros(self.num_experts + 3, dtype=torch.float64, device=device) if counts is None else counts
