"""Sizes of Chroma."""

from dataclasses import dataclass, field
from typing import Optional

from dit.errors import ConfigError
from dit.models.streams.config import StreamsConfig
from dit.ranges import WIDTH, check_unused, ranged


@dataclass(kw_only=True)
class ChromaConfig(StreamsConfig):
    """Chroma: FLUX.1 without pooled text and guidance; one network computes all modulations. The defaults are the 8.9B.

    Texts are the embeddings of T5-XXL, and that of one padding token if the text is not of maximal length
    (`dit.encoders.text_config`, `padded_once`).

    Attributes:
        approximator: `[input features, hidden size, residual blocks]` of the network of modulations.

    Source: diffusers 0.38, `transformer_chroma.py` and `pipeline_chroma.py`; lodestones/Chroma1-HD.
    """

    in_channels: int = 16
    context_size: Optional[int] = 4096
    hidden_size: int = 3072
    num_attention_heads: int = 24
    num_joint_layers: int = 19
    num_single_layers: int = 38
    ffn_hidden_size: Optional[int] = 12288
    approximator: list[int] = ranged([64, 5120, 5], WIDTH)
    rope_axes: list[int] = field(default_factory=lambda: [16, 56, 56])

    @property
    def approximator_sizes(self) -> list[int]:
        return self.approximator

    def validate(self) -> None:
        super().validate()
        sizes = self.approximator
        if len(sizes) != 3 or sizes[0] % 8:
            raise ConfigError(
                f"model.approximator={sizes} must be three positive numbers: features (a multiple of 8), hidden size "
                "and number of blocks"
            )
        where = "with ChromaConfig, which computes all modulations from the time"
        check_unused("model", self, ["pooled_size", "guidance"], where, "use FluxConfig")
