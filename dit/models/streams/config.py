"""Description of a transformer with text and image as two streams, then as one. A family is a set of its defaults."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Optional

from dit.condition_table import POOLED
from dit.conditions import Condition
from dit.errors import ConfigError
from dit.models.base import Supports, TransformerSizes
from dit.models.conditioned import NULLS, NullText, NullTextConditioned
from dit.models.transformer_config import Activation, TransformerModelConfig, check_query_groups
from dit.ranges import check_choice, check_unused

Positions = Literal["rope_3d", "sincos_2d", "sincos_3d"]
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
    Stable Diffusion 3; `num_query_groups` Lumina 2; `time_hidden_size`, `modulation_silu` and `learned_padding`
    Z-Image. Two families or more share each of the others.

    Attributes:
        block: `adaln_zero`: two streams have one attention over both (joint), a single block has its MLP parallel to
            attention. `sandwich`: each of two streams attends to itself (refiners, the text's without modulation), a
            single block has attention, then the MLP; both are between two RMSNorms and have a scale and a tanh gate.
        num_joint_layers: blocks with two streams.
        num_single_layers: blocks with one stream after them.
        num_query_groups: key and value heads of `sandwich` blocks; one per query head if None.
        num_dual_layers: first joint blocks, in which the image has a second attention, over itself.
        text_output: compute the text after the last joint block, for single blocks.
        shared_modulation: blocks share their modulations.
        approximator: `[input features, hidden size, residual blocks]` of one network that computes the modulations of
            all layers and of the head; None: each computes its own.
        add_bias: use biases in all linear layers; of `sandwich`, in attention and MLPs, and always in the others.
        qk_layernorm: normalise queries and keys (RMSNorm of each head).
        activation: of the MLPs; SwiGLU has `ffn_hidden_size` gated features.
        text_norm: RMSNorm on text embeddings before their projection.
        pooled_size: width of the pooled text embedding; None for none.
        guidance: guidance scale of a guidance-distilled network.
        condition_limit: largest width of the conditioning vector; otherwise that of the tokens.
        reversed_time: embed 1 - t instead of t.
        time_hidden_size: inner width of the time's embedder; that of the conditioning vector if None.
        modulation_silu: apply SiLU to the conditioning vector before the modulations of blocks.
        learned_padding: `sandwich` extends the text and the image of each sample to multiples of this number, with
            learned tokens that are attended to. 1 for none.
        rope_axes: features of a head that rotate with t, h and w, and with the text's index for
            `text_positions=own_axis`.
        text_positions: positions of text tokens: 0, an index on a fourth axis, or one after the image's.
            `before_image`: an index on t, where the image follows.
        centred_positions: count h and w from the centre of each picture.
        clean_reference_time: modulate reference tokens as clean ones, with the time 0, instead of the time of their
            sample. Other clean tokens are always modulated with the time 0.
        position_crop: `[side, span]`; sine-cosine positions are the centre of a square with `side` patches on each
            axis, whose positions range from 0 to `span`; None for the patch indices.
    """

    supports = Supports(split_texts=False, fixed_packs=True)
    frame_spacing: ClassVar[int] = 1
    """Distance of two frames, such as a picture and its reference, on the axis t of the rotary positions."""

    block: Block = "adaln_zero"
    num_joint_layers: int
    num_single_layers: int
    num_query_groups: Optional[int] = None
    num_dual_layers: int = 0
    text_output: bool = True
    shared_modulation: bool = False
    approximator: Optional[list[int]] = None
    add_bias: bool = True
    qk_layernorm: bool = True
    activation: Activation = "gelu_tanh"
    text_norm: bool = False
    pooled_size: Optional[int] = None
    guidance: Optional[float] = None
    condition_limit: Optional[int] = None
    reversed_time: bool = False
    time_hidden_size: Optional[int] = None
    modulation_silu: bool = True
    learned_padding: int = 1
    position_embedding: Positions = "rope_3d"
    rope_axes: list[int]
    text_positions: TextPositions = "origin"
    centred_positions: bool = False
    clean_reference_time: bool = False
    position_crop: Optional[list[int]] = None

    def conditions(self) -> tuple[Condition, ...]:
        if self.pooled_size is None:
            return super().conditions()
        pooled = replace(POOLED, shape=(self.pooled_size,), dropout=self.context_dropout, null=NULLS[self.null_text])
        return (*super().conditions(), pooled)

    @property
    def num_layers(self) -> int:
        """Number of blocks of both kinds."""
        return self.num_joint_layers + self.num_single_layers

    @property
    def condition_width(self) -> int:
        """Width of the conditioning vector."""
        return min(self.hidden_size, self.condition_limit or self.hidden_size)

    @property
    def takes_references(self) -> bool:
        """Whether samples may have a reference picture.

        References need rotary positions, joint attention from the first block on, and no latents.
        """
        has_latents = any(condition.axis == "latent" for condition in self.conditions())
        return self.position_embedding == "rope_3d" and self.block == "adaln_zero" and not has_latents

    @property
    def sample_multiple(self) -> int:
        return self.learned_padding

    @property
    def outer_bias(self) -> bool:
        """Whether linear layers outside attention and MLPs have biases."""
        return self.add_bias or self.block == "sandwich"

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
        self.check_sizes()
        check_choice("model.block", self.block, Block)
        check_choice("model.activation", self.activation, Activation)
        check_choice("model.text_positions", self.text_positions, TextPositions)
        check_choice("model.null_text", self.null_text, NullText)
        if self.context_size is None:
            raise ConfigError("model.context_size=None, but joint blocks need text; set it to the embeddings' width")
        if self.block == "sandwich":
            self._check_sandwich()
        elif (self.num_query_groups, self.modulation_silu, self.learned_padding) != (None, True, 1):
            raise ConfigError(
                f"model.num_query_groups={self.num_query_groups}, model.modulation_silu={self.modulation_silu} and "
                f"model.learned_padding={self.learned_padding} have no effect with model.block='adaln_zero'; use None, "
                "True and 1, or 'sandwich'"
            )
        if self.num_single_layers and self.block == "adaln_zero" and self.ffn_size % self.num_attention_heads:
            nearest = max(1, round(self.ffn_size / self.num_attention_heads)) * self.num_attention_heads
            raise ConfigError(
                f"model.ffn_hidden_size={self.ffn_size} is not a multiple of "
                f"model.num_attention_heads={self.num_attention_heads}, but a single-stream block splits its MLP over "
                f"the heads; use {nearest}"
            )
        self._check_blocks()
        if self.approximator is not None:
            self._check_approximator(self.approximator)
        self.check_positions(self.rope_axes)
        if self.position_embedding != "rope_3d":
            names = ["rope_axes", "text_positions", "centred_positions"]
            where = f"with model.position_embedding={self.position_embedding!r}"
            check_unused("model", self, names, where, "use 'rope_3d'")
        elif self.position_crop is not None:
            raise ConfigError(
                f"model.position_crop={self.position_crop} has no effect with model.position_embedding='rope_3d'; use "
                "'sincos_2d' or 'sincos_3d', or model.position_crop=None"
            )
        if self.position_crop is not None and len(self.position_crop) != 2:
            raise ConfigError(
                f"model.position_crop={self.position_crop} must be two numbers: side and span of a square"
            )

    def _check_sandwich(self) -> None:
        check_query_groups(self.num_attention_heads, self.num_query_groups)
        if self.num_dual_layers or self.shared_modulation or not self.num_single_layers:
            raise ConfigError(
                f"model.num_dual_layers={self.num_dual_layers}, model.shared_modulation={self.shared_modulation} and "
                f"model.num_single_layers={self.num_single_layers} with model.block={self.block}: its two streams meet "
                "only in single blocks, and each block has its own modulation and one attention; use 0, False and at "
                "least 1"
            )

    def _check_approximator(self, sizes: list[int]) -> None:
        if len(sizes) != 3 or min(sizes) < 1 or sizes[0] % 8:
            raise ConfigError(
                f"model.approximator={sizes} must be three positive numbers: features (a multiple of 8), hidden size "
                "and number of blocks"
            )
        required = {"block": "adaln_zero", "num_dual_layers": 0, "shared_modulation": False}
        required |= dict.fromkeys(("pooled_size", "guidance", "condition_limit", "time_hidden_size"))
        wrong = [name for name in required if getattr(self, name) != required[name]]
        if wrong:
            settings = ", ".join(f"model.{name}={getattr(self, name)}" for name in wrong)
            cure = ", ".join(f"model.{name}={required[name]}" for name in wrong)
            raise ConfigError(
                f"{settings} with model.approximator={sizes}, which computes all modulations from the time; use "
                f"{cure}, or model.approximator=None"
            )

    def _check_blocks(self) -> None:
        if self.num_dual_layers > self.num_joint_layers or (self.num_dual_layers and self.shared_modulation):
            raise ConfigError(
                f"model.num_dual_layers={self.num_dual_layers} with model.num_joint_layers={self.num_joint_layers} and "
                f"model.shared_modulation={self.shared_modulation}: a second attention is in a joint block with its "
                "own modulation; use fewer dual layers, and shared_modulation=False"
            )
        if not self.text_output and (self.num_single_layers or self.shared_modulation):
            raise ConfigError(
                f"model.text_output=False with model.num_single_layers={self.num_single_layers} and "
                f"model.shared_modulation={self.shared_modulation}: single blocks read the text, and a shared "
                "modulation has a gate; use model.text_output=True"
            )

    def megatron_sizes(self) -> TransformerSizes:
        return replace(
            super().megatron_sizes(),
            num_query_groups=self.num_query_groups,
            add_bias_linear=self.add_bias,
            qk_layernorm=self.qk_layernorm,
        )

    def layer_kind(self, layer: int) -> LayerKind:
        return LayerKind(
            joint=layer < self.num_joint_layers,
            dual=layer < self.num_dual_layers,
            text_output=self.text_output or layer < self.num_joint_layers - 1,
        )
