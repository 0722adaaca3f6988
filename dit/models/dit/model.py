"""The original DiT on Megatron-Core linears."""

from typing import Any

from torch import Tensor, nn

from dit.backends.init import xavier_uniform
from dit.backends.provider import LayerProvider
from dit.backends.sharding import state_every_stage
from dit.batch import PackedBatch
from dit.condition_table import LABEL
from dit.kernels.attention import Attention
from dit.layers.embeddings import LabelEmbedder, PooledTextEmbedder, TimestepEmbedder
from dit.layers.heads import FinalLayer
from dit.layers.tokens import embed_patches
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.dit.config import DiTConfig
from dit.models.dit.layer import DiTLayer
from dit.models.token_stack import TokenStack


class Conditioner(nn.Module):
    """The conditioning vector c: the sum of the embedded time, class and pooled text.

    Replicated over pipeline stages, which compute the same vector; the gradients of the copies are summed.
    """

    def __init__(self, config: DiTConfig, provider: LayerProvider) -> None:
        super().__init__()
        size = config.hidden_size
        self.time = TimestepEmbedder(
            size, provider, time_scale=config.time_scale, frequency_shift=config.time_frequency_shift
        )
        self.label = LabelEmbedder(config.num_classes, size, provider) if config.num_classes else None
        self.text = PooledTextEmbedder(config.context_size, size, provider) if config.context_size else None
        state_every_stage(self.parameters())

    def forward(self, time_S: Tensor, batch: PackedBatch) -> Tensor:
        cond_SD = self.time(time_S)
        if self.label is not None:
            cond_SD = cond_SD + self.label(batch.conditions[LABEL.name].values)
        if self.text is not None:
            cond_SD = cond_SD + self.text(batch)
        return cond_SD


class DiT(TokenStack):
    """DiT with adaLN-Zero: patch embedding, blocks, modulated zero-initialised head.

    Positions are computed from the patch indices instead of being stored in a table: the number of parameters is that
    of the paper's code minus its frozen table. Labels equal to `num_classes` mean "no class".

    Source: Peebles and Xie 2023, arXiv:2212.09748. Deviations: text may join the conditioning vector (mean-pooled);
    QK-layernorm, (t, h, w) positions and rotary positions are options.
    """

    embed: nn.Linear
    fsdp_units = (DiTLayer,)

    def __init__(self, config: DiTConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, provider, stage)
        self.conditioner = Conditioner(config, provider)
        if stage.first:
            init = xavier_uniform(config.token_channels, config.hidden_size)
            self.embed = provider.replicated_linear(config.token_channels, config.hidden_size, bias=True, init=init)
        self.layers = nn.ModuleDict({str(i): DiTLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            self.head = FinalLayer(config.hidden_size, config.output_features, provider, eps=config.layernorm_epsilon)

    def layer_inputs(
        self, cond_SD: Tensor, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch
    ) -> tuple[Any, ...]:
        return cond_SD, layout, self.rotation(batch)

    def embed_tokens(self, inputs_TC: Tensor, layout: SequenceLayout) -> Tensor:
        return embed_patches(self.embed, inputs_TC, layout)
