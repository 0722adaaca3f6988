"""Dispatch of tokens to the ranks of their experts, by Megatron-Core's all-to-all dispatcher.

Shape suffixes: T local tokens, E experts of the layer on all ranks, P tokens of the local experts, grouped by expert.
"""

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


class ExpertDispatch:
    """Dispatch and combine of one forward pass.

    Megatron-Core's `MoELayer` cannot express expert choice, because its router fixes the number of experts per token.
    Its dispatcher accepts any boolean map from tokens to experts if the config sets `moe_expert_capacity_factor`; it
    then counts the selected pairs, and otherwise it expects tokens x `moe_router_topk` pairs. This project therefore
    has its own routing (`dit.layers.routing`) and uses Megatron-Core's communication.

    Args:
        config: Megatron-Core's config with `num_moe_experts` and `moe_expert_capacity_factor`.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection, experts: range) -> None:
        assert config.moe_expert_capacity_factor is not None
        self._dispatcher = MoEAlltoAllTokenDispatcher(len(experts), list(experts), config, groups)

    def send(self, x_TD: Tensor, selected_TE: Tensor, weights_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Dispatch every selected token to its experts.

        Args:
            selected_TE: whether expert E takes token T, bool.

        Returns:
            The tokens of all ranks grouped by local expert `[P, D]`, their weights `[P]`, and the number of tokens of
            each expert, on the host.
        """
        dispatcher = self._dispatcher
        tokens, weights = dispatcher.dispatch_preprocess(x_TD, selected_TE, weights_TE)
        tokens, weights = dispatcher.token_dispatch(tokens, weights)
        tokens, counts, weights = dispatcher.dispatch_postprocess(tokens, weights)
        return tokens, weights, counts

    def collect(self, y_PD: Tensor) -> Tensor:
        """Combine: sum the experts' outputs per token on its rank, `[T, D]`; zeros for a token without expert."""
        dispatcher = self._dispatcher
        return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(y_PD)))
