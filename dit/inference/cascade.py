"""A cascade of models: each model enlarges the pictures of the previous one."""

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
"""Arguments of `Generator.generate` that are passed to every model of a cascade."""


class Cascade(Generator):
    """A super-resolution model and the generator of its small pictures (a model or a cascade), used as one model.

    `settings` are arguments of `before.generate`.
    """

    def __init__(
        self, model: Generator, before: Generator, settings: Mapping[str, Any], *, level: Optional[float] = None
    ) -> None:
        super().__init__(model.config, model.metadata, model.network, model.step)
        self.guide = model.guide
        low_resolution_of(self.spec)
        if model.text_encoder != before.text_encoder:
            raise ConfigError(
                f"a model of this cascade uses text encoder {model.text_encoder}, the model before it "
                f"{before.text_encoder}; both get the same embeddings, so train both on data of one encoder"
            )
        self.before, self.settings, self.level = before, dict(settings), level

    def generate(self, labels: Optional[Sequence[int]] = None, **options: Any) -> Tensor:
        """Generate small pictures and enlarge them; the models before this one get the options in `PASSED_ON`."""
        shared = {name: options[name] for name in PASSED_ON if name in options}
        pictures = list(self.before.generate(labels, **shared, **self.settings))
        conditions, size = enlarging(self.spec, pictures, self.level)
        conditions |= options.pop("conditions", None) or {}
        return super().generate(labels, **options | {"conditions": conditions} | size)


def low_resolution_of(spec: BatchSpec) -> LowResolution:
    """Return the function that makes the low-resolution condition of a model."""
    condition = spec.condition(LOW_RESOLUTION.name)
    if condition is None or not isinstance(condition.derive, LowResolution):
        raise ConfigError(
            "this model takes no low-resolution picture (model.low_resolution_factor is None), so it can only be the "
            "first stage of a cascade"
        )
    return condition.derive


def enlarging(
    spec: BatchSpec, pictures: Sequence[Tensor], level: Optional[float]
) -> tuple[dict[str, list[Value]], dict[str, Any]]:
    """Return conditions and size of samples that enlarge pictures `[C, 1, h, w]`, for `Generator.generate`."""
    low_resolution = low_resolution_of(spec)
    conditions: dict[str, list[Value]] = {
        LOW_RESOLUTION.name: [low_resolution.enlarge(picture) for picture in pictures]
    }
    if level is not None:
        conditions[AUGMENTATION.name] = [level] * len(pictures)
    height, width = pictures[0].shape[-2:]
    return conditions, {"frames": 1, "size": (height * low_resolution.factor, width * low_resolution.factor)}
