"""Families of `StreamsConfig` that differ only in settings; FLUX.1 and HunyuanVideo 1.5 have their own folders."""

from dataclasses import dataclass, field
from typing import Optional

from dit.errors import ConfigError
from dit.models.streams.config import StreamsConfig
from dit.models.transformer_config import Activation, Positions
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

    context_size: Optional[int] = 4096
    hidden_size: int = 3072
    num_attention_heads: int = 24
    num_joint_layers: int = 19
    num_single_layers: int = 38
    ffn_hidden_size: Optional[int] = 12288
    approximator: list[int] = ranged([64, 5120, 5], WIDTH)  # type: ignore[misc]

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


@dataclass(kw_only=True)
class Flux2Config(StreamsConfig):
    """FLUX.2: three modulations for all blocks, no biases, SwiGLU, a fourth axis for texts. The defaults are dev (32B).

    Texts are stacked hidden states of Mistral-3 (dev) or Qwen3 (klein). Latents have 32 channels, normalised for each
    position of a 2 x 2 patch.

    Source: diffusers 0.38, `transformer_flux2.py` and `pipeline_flux2.py`.
    """

    frame_spacing = 10
    shared_modulation = True
    add_bias = False
    text_positions = "own_axis"

    in_channels: int = 32
    context_size: Optional[int] = 15360
    hidden_size: int = 6144
    num_attention_heads: int = 48
    num_joint_layers: int = 8
    num_single_layers: int = 48
    ffn_hidden_size: Optional[int] = 18432
    activation: Activation = "swiglu"
    rope_theta: float = 2000.0
    rope_axes: list[int] = field(default_factory=lambda: [32, 32, 32, 32])


@dataclass(kw_only=True)
class Lumina2Config(StreamsConfig):
    """Lumina-Image 2.0: two refiners of text and image, then one stream; grouped queries. The defaults are 2.6B.

    Texts are hidden states of Gemma 2 2B. The network embeds 1 - t without a factor.

    Source: Qin et al. 2025, arXiv:2503.21758; diffusers 0.38, `transformer_lumina2.py`.
    """

    block = "sandwich"
    add_bias = False
    text_norm = True
    condition_limit = 1024
    reversed_time = True
    text_positions = "before_image"

    context_size: Optional[int] = 2304
    hidden_size: int = 2304
    num_attention_heads: int = 24
    num_query_groups: Optional[int] = 8
    num_joint_layers: int = 2
    num_single_layers: int = 26
    ffn_hidden_size: Optional[int] = 9216
    time_scale: float = 1.0
    layernorm_epsilon: float = 1e-5
    activation: Activation = "swiglu"
    rope_axes: list[int] = field(default_factory=lambda: [32, 32, 32])


@dataclass(kw_only=True)
class QwenImageConfig(StreamsConfig):
    """Qwen-Image: joint blocks only; image positions from the centre, texts after them. The defaults are the 20B model.

    Texts are hidden states of Qwen2.5-VL. The last block computes a text that nothing reads, as in the published model,
    so the weights for it have no gradient.

    Source: Wu et al. 2025, arXiv:2508.02324; diffusers 0.38, `transformer_qwenimage.py`.
    """

    text_norm = True
    text_positions = "after_image"
    centred_positions = True

    context_size: Optional[int] = 3584
    hidden_size: int = 3072
    num_attention_heads: int = 24
    num_joint_layers: int = 60
    num_single_layers: int = 0
    ffn_hidden_size: Optional[int] = 12288


@dataclass(kw_only=True)
class SD3Config(StreamsConfig):
    """Stable Diffusion 3 and 3.5: joint blocks only, added positions. The defaults are 3.5 large (8B).

    Texts are tokens of CLIP (twice, joined along the width) and of T5-XXL, joined along the text; the pooled text is
    that of both CLIP models.

    Source: Esser et al. 2024, arXiv:2403.03206; diffusers 0.38, `transformer_sd3.py`; sizes of 3.5 large.
    """

    text_output = False

    context_size: Optional[int] = 4096
    pooled_size: Optional[int] = 2048
    hidden_size: int = 2432
    num_attention_heads: int = 38
    num_joint_layers: int = 38
    num_single_layers: int = 0
    position_embedding: Positions = "sincos_2d"
    position_crop: Optional[list[int]] = field(default_factory=lambda: [192, 64])
    rope_axes: list[int] = field(default_factory=lambda: [16, 24, 24])


@dataclass(kw_only=True)
class ZImageConfig(StreamsConfig):
    """Z-Image: two refiners of text and image, then one stream; learned padding. The defaults are the 6B model.

    Texts are hidden states of Qwen3-4B. The network embeds 1 - t. Text and image of a sample are extended to multiples
    of 32 tokens inside the network, so packs and their token counts do not include these tokens.

    Source: Z-Image Team 2025, arXiv:2511.22699; diffusers 0.38, `transformer_z_image.py`.
    """

    block = "sandwich"
    add_bias = False
    text_norm = True
    condition_limit = 256
    reversed_time = True
    time_hidden_size = 1024
    modulation_silu = False
    sample_multiple = 32
    text_positions = "before_image"

    context_size: Optional[int] = 2560
    hidden_size: int = 3840
    num_attention_heads: int = 30
    num_joint_layers: int = 2
    num_single_layers: int = 30
    ffn_hidden_size: Optional[int] = 10240
    layernorm_epsilon: float = 1e-5
    activation: Activation = "swiglu"
    rope_theta: float = 256.0
    rope_axes: list[int] = field(default_factory=lambda: [32, 48, 48])
