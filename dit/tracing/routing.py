"""Even MoE routing for traces, in which router scores have no values."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def experts_evenly_full() -> Iterator[None]:
    """Route tokens evenly to all experts in this context; capacities are those of the program's routing."""
    from dit.layers import moe

    originals = {name: getattr(moe, name) for name in ("select_tokens", "select_experts")}
    for name, select in originals.items():
        setattr(moe, name, _evenly(select))
    try:
        yield
    finally:
        for name, select in originals.items():
            setattr(moe, name, select)


def _evenly(choose: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a routing function: it runs with the same cost, and returns its result for even scores."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def select(scores_TE: Tensor, *args: Any) -> Tensor:
        choose(scores_TE, *args)  # run for its cost only
        with unset_fake_temporarily():
            return choose(_even_scores(*scores_TE.shape), *args)

    return select


def _even_scores(tokens: int, experts: int) -> Tensor:
    """Return scores `[T, E]` with which consecutive tokens prefer consecutive experts."""
    return -((torch.arange(experts)[None] - torch.arange(tokens)[:, None]) % experts).float()
