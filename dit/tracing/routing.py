"""Even MoE routing for traces, in which router scores have no values."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from dit.patches import replaced
from dit.tracing.counter import StepCounter


def experts_evenly_full() -> AbstractContextManager[None]:
    """Route tokens evenly to all experts in this context; capacities are those of the program's routing."""
    from dit.layers import moe

    names = ("select_tokens", "select_experts")
    return replaced(moe, **{name: _evenly(getattr(moe, name)) for name in names})


def _evenly(choose: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a routing function: it runs with the same cost, and returns its result for even scores."""

    def select(scores_TE: Tensor, *args: Any) -> Tensor:
        choose(scores_TE, *args)  # run for its cost only
        with replaced(StepCounter, keeps_values=True):
            return choose(_even_scores(*scores_TE.shape), *args)

    return select


def _even_scores(tokens: int, experts: int) -> Tensor:
    """Return scores `[T, E]` with which consecutive tokens prefer consecutive experts."""
    return -((torch.arange(experts)[None] - torch.arange(tokens)[:, None]) % experts).float()
