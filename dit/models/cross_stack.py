"""Backbones with one token stream, whose blocks attend to the text of their sample."""

from collections.abc import Callable
from typing import Any, Optional, TypedDict, TypeVar, Unpack

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.attention import Attention
from dit.layers.adaln import shared_modulation
from dit.layers.conditioner import Conditioner
from dit.layers.heads import TableFinalLayer
from dit.layers.text import TextTokens, text_projection
from dit.layers.tokens import PatchEmbedding
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.cross_config import CrossAttentionModelConfig
from dit.models.token_stack import TokenStack

Config = TypeVar("Config", bound=CrossAttentionModelConfig)


class AttentionOptions(TypedDict, total=False):
    """Options common to the self- and cross-attention of a block, see `SelfAttention`."""

    num_query_groups: Optional[int]
    bias: bool
    qk_layernorm: bool
    norm_full_width: bool
    eps: float


def attention_options(config: CrossAttentionModelConfig, **others: Unpack[AttentionOptions]) -> AttentionOptions:
    """Return the options that follow from the settings, and others, which take precedence."""
    return {
        "num_query_groups": config.num_query_groups,
        "qk_layernorm": config.qk_layernorm,
        "norm_full_width": config.norm_full_width,
        "eps": config.layernorm_epsilon,
        **others,
    }


class CrossStack(TokenStack[Config]):
    """A stack of blocks with cross-attention. A subclass builds `layers`, and then `head` (last stage)."""

    def __init__(
        self, config: Config, provider: LayerProvider, stage: Stage, attention: Optional[Attention] = None
    ) -> None:
        super().__init__(config, provider, stage, attention)
        size, side = config.hidden_size, config.patch_spatial
        self.conditioner = Conditioner(
            size,
            provider,
            time_scale=config.time_scale,
            num_classes=config.num_classes,
            fps=config.fps_conditioning,
            size_patch=(config.patch_temporal, side, side) if config.size_conditioning else None,
        )
        self.text = TextTokens(config.text_size(), provider, learned_null=config.null_text == "learned")
        if stage.first:
            self.embed = PatchEmbedding(config.input_features, size, provider)

    def layer_inputs(
        self, cond_SD: Tensor, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch
    ) -> tuple[Any, ...]:
        context_KC, context_layout = self.text(batch)
        return cond_SD, context_KC, layout, context_layout, self.attention_input(batch)

    def attention_input(self, batch: PackedBatch) -> Any:
        """Return what self-attention of every block needs in addition to tokens: the rotation, unless overridden."""
        return self.rotation(batch)


class SharedModulationStack(CrossStack[Config]):
    """A `CrossStack` in which blocks and head add a table to one modulation, and the text has a projection.

    Source: adaLN-single of Chen et al. 2023 (PixArt-alpha), arXiv:2310.00426, section 2.3.
    """

    def __init__(
        self,
        config: Config,
        provider: LayerProvider,
        stage: Stage,
        build_layer: Callable[[int], nn.Module],
        *,
        num_sublayers: int = 2,
        text_norm_eps: Optional[float] = None,
    ) -> None:
        super().__init__(config, provider, stage)
        size = config.hidden_size
        self.modulation = shared_modulation(size, num_sublayers, provider)
        self.text_projection = text_projection(config.text_size(), size, provider, norm_eps=text_norm_eps)
        self.layers = nn.ModuleDict({str(i): build_layer(i) for i in stage.layers})
        if stage.last:
            self.head = TableFinalLayer(size, config.output_features, provider, eps=config.layernorm_epsilon)

    def layer_inputs(
        self, cond_SD: Tensor, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch
    ) -> tuple[Any, ...]:
        _, context_KC, *others = super().layer_inputs(cond_SD, positions_T3, layout, batch)
        return self.modulation(cond_SD), self.text_projection(context_KC), *others
