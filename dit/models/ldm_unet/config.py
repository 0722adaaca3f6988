"""Sizes of the latent-diffusion UNet."""

from dataclasses import dataclass, replace
from typing import Literal, Optional

from dit.condition_table import CONTEXT, POOLED, SIZE_AND_CROP
from dit.conditions import Condition
from dit.errors import ConfigError
from dit.models.base import PICTURES, TransformerSizes
from dit.models.conditioned import NULLS, ControlConditioned, NullTextConditioned
from dit.models.lora_config import LoRAConfig
from dit.ranges import LAYERS, LAYERS_OR_ZERO, WIDTH, ranged

NullText = Literal["learned", "empty", "zeros"]
TWO_ENCODERS = (
    "this model reads the tokens of two encoders side by side, and the second one's features are missing: "
    "--text-encoder text=FIRST:layer=penultimate:padded "
    "--text-encoder text+pooled=SECOND:layer=penultimate:padded:joined (SDXL: CLIP ViT-L and OpenCLIP ViT-bigG)"
)


@dataclass(kw_only=True)
class LDMUNetConfig(NullTextConditioned, ControlConditioned):
    """The UNet of latent diffusion, conditioned on time and text.

    The default sizes are those of Stable Diffusion v1: 859,520,964 parameters, plus a learned null token unless
    `null_text` selects another null. Stable Diffusion XL, 2,567,463,684 parameters, is `model=sdxl_unet` in recipes.
    The conditioning vector is four times as wide as the first level. With `head_size`, diffusers' files have linear
    layers for the projections around a transformer; without, convolutions.

    Attributes:
        block_out_channels: channels at each resolution, the full one first.
        layers_per_block: residual blocks at each resolution down; one more up.
        transformer_layers, mid_transformer_layers: transformer layers after each residual block, and in the middle.
        num_attention_heads: attention heads (of SANA, linear ones); of a UNet with `head_size`, if that is None.
        head_size: features per attention head; None: `num_attention_heads` counts.
        pooled_size: width of the pooled text embedding (of SDXL, with sizes and crop position).
        norm_num_groups: groups of the group norms.
        lora: train only adapters of the model in `checkpoint.start_from`.

    Source of the pooled text and the lengths: Podell et al. 2023 (SDXL), arXiv:2307.01952, sections 2.1 and 2.2.
    """

    supports = PICTURES

    patch_spatial: int = 1
    context_size: Optional[int] = 768
    block_out_channels: list[int] = ranged([320, 640, 1280, 1280], WIDTH)
    layers_per_block: int = ranged(2, LAYERS)
    transformer_layers: list[int] = ranged([1, 1, 1, 0], LAYERS_OR_ZERO)
    mid_transformer_layers: int = ranged(1, LAYERS_OR_ZERO)
    num_attention_heads: int = ranged(8, WIDTH)
    head_size: Optional[int] = ranged(None, WIDTH)
    norm_num_groups: int = ranged(32, WIDTH)
    pooled_size: Optional[int] = ranged(None, WIDTH)
    null_text: NullText = "learned"  # type: ignore[assignment]
    lora: Optional[LoRAConfig] = None

    def conditions(self) -> tuple[Condition, ...]:
        conditions = super().conditions()
        if self.pooled_size is not None:
            pooled_null = NULLS[self.null_text] if self.null_text == "empty" else 0.0
            pooled = replace(POOLED, shape=(self.pooled_size,), dropout=self.context_dropout, null=pooled_null)
            texts = (replace(c, made_with=TWO_ENCODERS) if c.name == CONTEXT.name else c for c in conditions)
            conditions = (*texts, pooled, SIZE_AND_CROP)
        return conditions

    def heads(self, channels: int) -> int:
        return self.num_attention_heads if self.head_size is None else channels // self.head_size

    @property
    def head_sizes(self) -> frozenset[int]:
        channels = self.block_out_channels
        levels = zip([*channels, channels[-1]], [*self.transformer_layers, self.mid_transformer_layers])
        return frozenset(count // self.heads(count) for count, layers in levels if layers)

    @property
    def halvings(self) -> int:
        return len(self.block_out_channels) - 1

    @property
    def condition_size(self) -> int:
        """Width of the conditioning vector."""
        return 4 * self.block_out_channels[0]

    def validate(self) -> None:
        super().validate()
        channels, groups, heads = self.block_out_channels, self.norm_num_groups, self.num_attention_heads
        if len(self.transformer_layers) != len(channels) or not channels:
            raise ConfigError(
                f"model.transformer_layers={self.transformer_layers} must have one number for each resolution of "
                f"model.block_out_channels={channels}"
            )
        unit, name = (heads, "num_attention_heads") if self.head_size is None else (self.head_size, "head_size")
        attending = [count for count, layers in zip(channels, self.transformer_layers) if layers] + channels[-1:]
        split = channels if self.head_size is None else attending
        if channels[0] % 2 or any(count % groups for count in channels) or any(count % unit for count in split):
            raise ConfigError(
                f"model.block_out_channels={channels} must be even, and multiples of model.norm_num_groups={groups} "
                f"and of model.{name}={unit}"
            )
        if not any(self.transformer_layers) and not self.mid_transformer_layers:
            raise ConfigError(
                f"with model.transformer_layers={self.transformer_layers} and model.mid_transformer_layers=0 no layer "
                "attends to the text; set one of them above 0"
            )

    def megatron_sizes(self) -> TransformerSizes:
        return TransformerSizes(
            num_layers=1,
            hidden_size=self.block_out_channels[-1],
            num_attention_heads=self.heads(self.block_out_channels[-1]),
        )
