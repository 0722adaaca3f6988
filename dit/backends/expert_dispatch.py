"""Tokens to the ranks that hold their experts, and back: Megatron-Core's all-to-all dispatcher behind two calls."""

from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


class ExpertDispatch:
    """One trip of tokens to experts and back.

    Megatron-Core's `MoELayer` cannot express expert choice: its router fixes how many experts a token has. Its
    dispatcher can. It takes any boolean map from tokens to experts, as long as the config's
    `moe_expert_capacity_factor` is set: then it counts the chosen pairs, where it would otherwise expect
    tokens x `moe_router_topk` of them. So the choice is ours and the communication is Megatron-Core's.

    Args:
        config: with `num_moe_experts` and `moe_expert_capacity_factor`.
        groups: its `ProcessGroupCollection`.
        experts: global indices of the experts held here.
    """

    def __init__(self, config: TransformerConfig, groups: Any, experts: range) -> None:
        assert config.moe_expert_capacity_factor is not None
        self._dispatcher = MoEAlltoAllTokenDispatcher(len(experts), list(experts), config, groups)

    def send(self, x_TD: Tensor, selected_TE: Tensor, weights_TE: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Bring every chosen token to its experts.

        Args:
            x_TD: tokens held here.
            selected_TE: which of all experts take which token, bool.
            weights_TE: weight of each pair.

        Returns:
            For each expert held here, the tokens of all ranks that it takes and their weights.
        """
        dispatcher = self._dispatcher
        tokens, weights = dispatcher.dispatch_preprocess(x_TD, selected_TE, weights_TE)
        tokens, weights = dispatcher.token_dispatch(tokens, weights)
        tokens, counts, weights = dispatcher.dispatch_postprocess(tokens, weights)
        sizes = counts.tolist()
        return list(tokens.split(sizes)), list(weights.split(sizes))

    def collect(self, y_PD: Tensor) -> Tensor:
        """Bring the experts' outputs, expert after expert, home and add them up per token.

        Returns:
            `[T, D]`; zeros for a token that no expert took.
        """
        dispatcher = self._dispatcher
        return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y_PD)))
