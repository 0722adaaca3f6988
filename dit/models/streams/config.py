"""Description of a transformer with text and image as two streams, then as one.

A family is a subclass with its own defaults and class constants. No published size of a family changes a constant.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Optional

from dit.condition_table import POOLED
from dit.conditions import Condition
from dit.errors import ConfigError
from dit.models.base import Supports
from dit.models.conditioned import NULLS, NullTextConditioned
from dit.models.transformer_config import Activation, Positions, TransformerModelConfig, check_query_groups
from dit.ranges import LAYERS, LAYERS_OR_ZERO, NOT_NEGATIVE, PATCHES, RANGE, WIDTH, check_unused, ranged

TextPositions = Literal["origin", "own_axis", "after_image", "before_image"]
Block = Literal["adaln_zero", "sandwich"]


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Parts of a block.

    Attributes:
        joint: two streams.
        dual: a second attention of the image.
        text_output: layers that compute the text for the next block.
    """

    joint: bool
    dual: bool
    text_output: bool


@dataclass(kw_only=True)
class StreamsConfig(TransformerModelConfig, NullTextConditioned):
    """Blocks with text and image as two streams, then single blocks (one stream).

    Some settings serve only one family of published models: `approximator` Chroma; `shared_modulation` FLUX.2;
    `centred_positions` and `clean_reference_time` Qwen-Image; `num_dual_layers`, `text_output` and `position_crop`
    Stable Diffusion 3; `num_query_groups` Lumina 2; `time_hidden_size`, `modulation_silu` and `sample_multiple`
    Z-Image. Two families or more share each of the others.

    Attributes:
        num_joint_layers, num_single_layers: blocks with two streams, and following ones with one.
        num_query_groups: key and value heads; one per query head if None.
        num_dual_layers: first joint blocks with a second attention of the image to itself.
        qk_layernorm: RMSNorm on queries and keys, per head; of SANA 1.5, over the full width.
        activation: of the MLPs; SwiGLU has `ffn_hidden_size` gated features.
        pooled_size: width of the pooled text embedding (of SDXL, with sizes and crop position).
        guidance: guidance scale of a guidance-distilled network.
        rope_axes: features of a head that rotate with t, h, w and, of FLUX.2, the text's index; None for a third each.
        clean_reference_time: modulate reference tokens with time 0, not with that of their sample.
        position_crop: `[side, span]`: sine-cosine positions from the centre of `side` x `side` patches, from 0 to
            `span`; None for patch indices.
    """

    supports = Supports(split_texts=False, fixed_packs=True)
    frame_spacing: ClassVar[int] = 1
    """Distance of two frames, such as a picture and its reference, on the axis t of the rotary positions."""
    block: ClassVar[Block] = "adaln_zero"
    """`adaln_zero`: two streams have one attention over both (joint), a single block has its MLP parallel to attention.
    `sandwich`: each of two streams attends to itself (refiners, the text's without modulation), a single block has
    attention, then the MLP; both are between two RMSNorms and have a scale and a tanh gate."""
    text_output: ClassVar[bool] = True
    """The last joint block also computes the text, which single blocks need."""
    shared_modulation: ClassVar[bool] = False
    """All blocks use the same modulations."""
    add_bias: ClassVar[bool] = True
    """Linear layers have biases. In `sandwich` blocks, this is a choice of attention and MLPs only."""
    text_norm: ClassVar[bool] = False
    """An RMSNorm normalises text embeddings before their projection."""
    condition_limit: ClassVar[Optional[int]] = None
    """Largest width of the conditioning vector; None for that of the tokens."""
    reversed_time: ClassVar[bool] = False
    """The network embeds 1 - t instead of t."""
    time_hidden_size: ClassVar[Optional[int]] = None
    """Inner width of the time's embedder; None for that of the conditioning vector."""
    approximator: ClassVar[Optional[list[int]]] = None
    """Sizes of one network that computes the modulations of all layers and of the head; None: each has its own."""
    modulation_silu: ClassVar[bool] = True
    """The modulations of `sandwich` blocks are computed from the SiLU of the conditioning vector."""
    sample_multiple: ClassVar[int] = 1
    """`sandwich` extends the text and the image of each sample to multiples of this number, with learned tokens that
    are attended to."""
    text_positions: ClassVar[TextPositions] = "origin"
    """Positions of text tokens: 0, an index on a fourth axis, or one after the image's. `before_image`: an index on t,
    where the image follows."""
    centred_positions: ClassVar[bool] = False
    """Positions h and w are counted from the centre of each picture."""

    in_channels: int = 16
    num_joint_layers: int = field(metadata={RANGE: LAYERS})
    num_single_layers: int = field(metadata={RANGE: LAYERS_OR_ZERO})
    num_query_groups: Optional[int] = ranged(None, WIDTH)
    num_dual_layers: int = ranged(0, LAYERS_OR_ZERO)
    qk_layernorm: bool = True
    activation: Activation = "gelu_tanh"
    pooled_size: Optional[int] = ranged(None, WIDTH)
    guidance: Optional[float] = ranged(None, NOT_NEGATIVE)
    position_embedding: Positions = "rope_3d"
    rope_axes: list[int] = ranged([16, 56, 56], LAYERS_OR_ZERO)
    clean_reference_time: bool = False
    position_crop: Optional[list[int]] = ranged(None, PATCHES)

    def conditions(self) -> tuple[Condition, ...]:
        if self.pooled_size is None:
            return super().conditions()
        pooled = replace(POOLED, shape=(self.pooled_size,), dropout=self.context_dropout, null=NULLS[self.null_text])
        return (*super().conditions(), pooled)

    @property
    def num_layers(self) -> int:
        return self.num_joint_layers + self.num_single_layers

    @property
    def condition_width(self) -> int:
        return min(self.hidden_size, self.condition_limit or self.hidden_size)

    @property
    def takes_references(self) -> bool:
        """Whether samples may have a reference picture.

        References need rotary positions, joint attention from the first block on, and no latents.
        """
        has_latents = any(condition.axis == "latent" for condition in self.conditions())
        return self.position_embedding == "rope_3d" and self.block == "adaln_zero" and not has_latents

    @property
    def mlp_inputs(self) -> int:
        """Output features of the first linear layer of an MLP."""
        return self.ffn_size * (2 if self.activation == "swiglu" else 1)

    def sublayers(self, layer: int) -> Optional[list[int]]:
        """Return the indices of a layer's modulations in the list of the whole model; None if it computes its own.

        The order in a joint layer is attention and MLP of the text, then of the image.
        """
        joint, single = self.num_joint_layers, self.num_single_layers
        if self.shared_modulation:
            return [0, 1, 2, 3] if layer < joint else [4]
        if self.approximator is None:
            return None
        text, image = (single + 2 * (start + layer) for start in (joint, 0))
        return [text, text + 1, image, image + 1] if layer < joint else [layer - joint]

    @property
    def position_axes(self) -> tuple[str, ...]:
        return (*super().position_axes, *(["text index"] if self.text_positions == "own_axis" else []))

    def validate(self) -> None:
        super().validate()
        if self.block == "sandwich":
            check_query_groups(self.num_attention_heads, self.num_query_groups)
            if self.num_dual_layers or not self.num_single_layers:
                raise ConfigError(
                    f"model.num_dual_layers={self.num_dual_layers} and model.num_single_layers={self.num_single_layers}"
                    f": the two streams of {type(self).__name__} meet only in single blocks, and each block has one "
                    "attention; use 0 and at least 1"
                )
        else:
            where = f"with {type(self).__name__}, whose blocks have one key and value head per query head"
            check_unused("model", self, ["num_query_groups"], where, "use None")
        if self.num_single_layers and self.block == "adaln_zero" and self.ffn_size % self.num_attention_heads:
            nearest = max(1, round(self.ffn_size / self.num_attention_heads)) * self.num_attention_heads
            raise ConfigError(
                f"model.ffn_hidden_size={self.ffn_size} is not a multiple of "
                f"model.num_attention_heads={self.num_attention_heads}, but a single-stream block splits its MLP over "
                f"the heads; use {nearest}"
            )
        most = 0 if self.shared_modulation or self.approximator else self.num_joint_layers
        if self.num_dual_layers > most:
            raise ConfigError(
                f"model.num_dual_layers={self.num_dual_layers} with {type(self).__name__} and "
                f"model.num_joint_layers={self.num_joint_layers}: a second attention is in a joint block with its own "
                f"modulation; use at most {most} dual layers"
            )
        if self.num_single_layers and not self.text_output:
            raise ConfigError(
                f"model.num_single_layers={self.num_single_layers}, but the last joint block of {type(self).__name__} "
                "computes no text, which single blocks read; use 0"
            )
        if self.position_embedding == "rope_3d" and self.position_crop is not None:
            raise ConfigError(
                f"model.position_crop={self.position_crop} has no effect with model.position_embedding='rope_3d'; use "
                "'sincos_2d' or 'sincos_3d', or model.position_crop=None"
            )
        if self.position_crop is not None and len(self.position_crop) != 2:
            raise ConfigError(
                f"model.position_crop={self.position_crop} must be two numbers: side and span of a square"
            )

    def layer_kind(self, layer: int) -> LayerKind:
        return LayerKind(
            joint=layer < self.num_joint_layers,
            dual=layer < self.num_dual_layers,
            text_output=self.text_output or layer < self.num_joint_layers - 1,
        )
