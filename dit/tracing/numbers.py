"""Random numbers without values: drawing them for all tokens takes seconds, and a trace does not use them."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from dit import philox
from dit.patches import replaced
from dit.philox import Words

FEW_NUMBERS = 1 << 12
"""Draws of up to this many numbers keep their values; per-sample numbers decide which conditions are dropped."""


def numbers_without_values(fakes: Any) -> AbstractContextManager[None]:
    """Replace large random draws by fake tensors in this context."""
    from torch.utils._python_dispatch import _disable_current_modes

    original = philox.ten_rounds

    def ten_rounds(counter: Words, key: tuple[int | Tensor, int | Tensor]) -> Words:
        if counter[0].numel() > FEW_NUMBERS:
            with _disable_current_modes():
                c0, c1, c2, c3 = map(fakes.from_tensor, counter)
            counter = c0, c1, c2, c3
        return original(counter, key)

    return replaced(philox, ten_rounds=ten_rounds)
