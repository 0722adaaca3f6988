"""A model of time intervals (MeanFlow) starts from weights of the same model without them.

    conditioner.interval.linear_1    weights of conditioner.time.linear_1
    conditioner.interval.linear_2    zeros

The first prediction is that of the stored weights.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from dit.boxes import Box
from dit.checkpoint.state_files import Weights
from dit.errors import ConfigError
from dit.models.base import ModelConfig

INTERVAL, TIME = "conditioner.interval.", "conditioner.time."
"""Name prefixes of the embeddings of time intervals and of times, which have the same sizes."""
OUTPUT = f"{INTERVAL}linear_2"


class WithoutInterval:
    """Weights that lack the embedding of time intervals."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        of_time = {name: shape for name, shape in weights.shapes.items() if name.startswith(TIME)}
        self.shapes = {**weights.shapes, **{name.replace(TIME, INTERVAL): shape for name, shape in of_time.items()}}

    def read(self, name: str, shape: Sequence[int], views: Iterable[tuple[Box, Tensor]]) -> None:
        """Copy boxes of a parameter into memory, see `StateReader.read`."""
        if name.startswith(OUTPUT):
            for _, target in views:
                target.zero_()
        else:
            self.weights.read(name.replace(INTERVAL, TIME), shape, views)

    def __str__(self) -> str:
        return f"{self.weights}, an embedding of time intervals that starts at zero"


def with_interval(weights: Weights, model: ModelConfig) -> Weights:
    """Return weights for a model, with an embedding of time intervals if it reads them and the weights lack it.

    Raises:
        ConfigError: the model trains only adapters, and none of them changes the zeros.
    """
    is_stored = any(name.startswith(INTERVAL) for name in weights.shapes)
    if is_stored or not getattr(model, "interval_conditioning", False):
        return weights
    lora = model.adapters
    if lora is not None and not any(fnmatchcase(OUTPUT, pattern) for pattern in lora.targets):
        raise ConfigError(
            f"model.interval_conditioning reads time intervals, which the model in checkpoint.start_from does not "
            f"read, so {OUTPUT} is zero, which no adapter changes; add '{INTERVAL}*' to "
            f"model.lora.targets={lora.targets}, or train all weights (the recipe finetune)"
        )
    return WithoutInterval(weights)
