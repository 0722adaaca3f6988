"""Settings of models that are conditioned on a class or a text.

A backbone's config lists these classes after the class of its sizes, whose defaults then take precedence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Optional

from dit.condition_table import CONTEXT, CONTROL, LABEL
from dit.conditions import Condition
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.ranges import COUNT, SHARE, WIDTH, ranged

NullText = Literal["learned", "empty"]
NULLS: Mapping[str, float | Literal["learned", "empty text"]] = {
    "learned": "learned",
    "empty": "empty text",
    "zeros": 0.0,
}
"""Null value of the text by `null_text`."""


@dataclass(kw_only=True)
class ClassConditioned(ModelConfig):
    """A model that may be conditioned on a class.

    Attributes:
        num_classes: classes, without the unconditional one.
        class_dropout: fraction of dropped classes, for guidance.
    """

    num_classes: Optional[int] = ranged(None, COUNT)
    class_dropout: float = ranged(0.1, SHARE)

    def conditions(self) -> tuple[Condition, ...]:
        if self.num_classes is None:
            return super().conditions()
        return (*super().conditions(), replace(LABEL, num_classes=self.num_classes, dropout=self.class_dropout))


@dataclass(kw_only=True)
class TextConditioned(ModelConfig):
    """A model that may be conditioned on a text.

    Attributes:
        context_size: width of the text embeddings.
        context_dropout: fraction of dropped texts, for guidance; the smaller of this and `class_dropout` drops text and
            class together.
    """

    context_size: Optional[int] = ranged(None, WIDTH)
    context_dropout: float = ranged(0.1, SHARE)

    def conditions(self) -> tuple[Condition, ...]:
        if self.context_size is None:
            return super().conditions()
        return (*super().conditions(), replace(CONTEXT, shape=(self.context_size,), dropout=self.context_dropout))


@dataclass(kw_only=True)
class NullTextConditioned(TextConditioned):
    """A model that attends to text, with a choice of the replacement of a dropped text.

    Attributes:
        null_text: replacement of a dropped text, also in guidance: a learned token, or the embedding of the empty text
            (diffusers; `LDMUNetConfig` needs `:padded` encoders for it, and also has zeros).
    """

    null_text: NullText = "learned"

    def validate(self) -> None:
        super().validate()
        self.text_size()  # raises an error for None

    def text_size(self) -> int:
        """Return the width of the text embeddings."""
        if self.context_size is None:
            raise ConfigError(
                f"model.context_size=None, but {type(self).__name__} attends to text; set it to the width of the text "
                "embeddings (1024 for T5-large), or use the DiT backbone, which needs no text"
            )
        return self.context_size

    def conditions(self) -> tuple[Condition, ...]:
        null = NULLS[self.null_text]
        return tuple(replace(c, null=null) if c.name == CONTEXT.name else c for c in super().conditions())


@dataclass(kw_only=True)
class ControlConditioned(ModelConfig):
    """A model that may read a control picture of the size of its sample, such as depth, edges or a semantic map.

    Attributes:
        control_channels: channels of a control picture, which follow those of the noised latent.

    Source: Rombach et al. 2022, arXiv:2112.10752, section 4.3.2 (semantic synthesis).
    """

    control_channels: Optional[int] = ranged(None, WIDTH)

    def conditions(self) -> tuple[Condition, ...]:
        if self.control_channels is None:
            return super().conditions()
        stored_as = (*CONTROL.stored_as, "reference")  # the picture of `energon_data.prepare --reference`
        return (*super().conditions(), replace(CONTROL, shape=(self.control_channels,), stored_as=stored_as))

    @property
    def input_features(self) -> int:
        return self.token_channels // self.in_channels * (self.in_channels + (self.control_channels or 0))

    @property
    def takes_references(self) -> bool:
        return super().takes_references and self.control_channels is None
