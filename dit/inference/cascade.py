"""A cascade of models: each enlarges the pictures of the one before it."""

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from torch import Tensor

from dit.condition_table import AUGMENTATION, LOW_RESOLUTION
from dit.conditions import Value
from dit.data_api import BatchSpec
from dit.errors import ConfigError
from dit.inference.generator import Generator
from dit.resize import LowResolution

PASSED_ON = ("count", "conditions", "negative", "seed", "seeds", "numbers")
"""Arguments of `Generator.generate` that every model of a cascade gets."""


class Cascade(Generator):
    """A super-resolution model and what draws the pictures that it enlarges, drawn from as one model.

    Args:
        own: the model.
        before: draws the small pictures: a model, or a cascade.
        settings: of `before.generate`.
        level: noise level of the small pictures; None for the model's own.

    Raises:
        ConfigError: the model takes no low-resolution picture, or reads texts through another encoder.
    """

    def __init__(
        self, own: Generator, before: Generator, settings: Mapping[str, Any], *, level: Optional[float] = None
    ) -> None:
        super().__init__(own.config, own.metadata, own.network, own.step)
        self.guide = own.guide
        low_resolution_of(self.spec)
        if own.text_encoder != before.text_encoder:
            raise ConfigError(
                f"a model of this cascade reads texts through {own.text_encoder}, the one before it through "
                f"{before.text_encoder}; they get the same embeddings, so train both on data of one encoder"
            )
        self.before, self.settings, self.level = before, dict(settings), level

    def generate(self, labels: Optional[Sequence[int]] = None, **given: Any) -> Tensor:
        """Draw small pictures and enlarge them; arguments as of `Generator.generate`, for this model.

        Those of `PASSED_ON` are for the models before it, too.
        """
        shared = {name: given[name] for name in PASSED_ON if name in given}
        pictures = list(self.before.generate(labels, **shared, **self.settings))
        conditions, size = enlarging(self.spec, pictures, self.level)
        conditions |= given.pop("conditions", None) or {}
        return super().generate(labels, **given | {"conditions": conditions} | size)


def low_resolution_of(spec: BatchSpec) -> LowResolution:
    """Return how the low-resolution picture of a model is made.

    Raises:
        ConfigError: it takes none.
    """
    condition = spec.condition(LOW_RESOLUTION.name)
    if condition is None or not isinstance(condition.derive, LowResolution):
        raise ConfigError(
            "this model takes no low-resolution picture (model.low_resolution_factor is None): it draws from noise "
            "alone, and can only be the first stage of a cascade"
        )
    return condition.derive


def enlarging(
    spec: BatchSpec, pictures: Sequence[Tensor], level: Optional[float]
) -> tuple[dict[str, list[Value]], dict[str, Any]]:
    """Return the conditions of samples that are drawn from small pictures, and their size for `Generator.generate`.

    Args:
        pictures: `[C, 1, h, w]` of each sample, of one size.
        level: noise level of the pictures; None for the model's own.

    Raises:
        ConfigError: the model takes none.
    """
    made_by = low_resolution_of(spec)
    conditions: dict[str, list[Value]] = {LOW_RESOLUTION.name: [made_by.enlarge(picture) for picture in pictures]}
    if level is not None:
        conditions[AUGMENTATION.name] = [level] * len(pictures)
    height, width = pictures[0].shape[-2:]
    return conditions, {"frames": 1, "size": (height * made_by.factor, width * made_by.factor)}
