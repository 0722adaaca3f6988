"""The original DiT on Megatron-Core linears."""

from torch import Tensor, nn

from dit.backends.init import xavier_uniform
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import LABEL
from dit.kernels.attention import Attention
from dit.layers.embeddings import LabelEmbedder, PooledTextEmbedder, TimestepEmbedder
from dit.layers.heads import FinalLayer
from dit.layers.positions import add_sincos
from dit.layers.tokens import from_previous_stage, gather_rows, shard_rows, to_next_stage
from dit.layout import SequenceLayout
from dit.models.base import Backbone, Stage
from dit.models.dit.config import DiTConfig
from dit.models.dit.layer import DiTLayer


class Conditioner(nn.Module):
    """The conditioning vector c: the sum of the embedded time, class and pooled text.

    Every pipeline stage holds a copy and computes c from the same inputs; the copies' gradients are summed.
    """

    def __init__(self, config: DiTConfig, provider: LayerProvider) -> None:
        super().__init__()
        size = config.hidden_size
        self.time = TimestepEmbedder(
            size, provider, time_scale=config.time_scale, frequency_shift=config.time_frequency_shift
        )
        self.label = LabelEmbedder(config.num_classes, size, provider) if config.num_classes else None
        self.text = PooledTextEmbedder(config.context_size, size, provider) if config.context_size else None
        for parameter in self.parameters():
            parameter.pipeline_parallel = True  # type: ignore[attr-defined]

    def forward(self, time_S: Tensor, batch: PackedBatch) -> Tensor:
        cond_SD = self.time(time_S)
        if self.label is not None:
            cond_SD = cond_SD + self.label(batch.conditions[LABEL.name].values)
        if self.text is not None:
            cond_SD = cond_SD + self.text(batch)
        return cond_SD


class DiT(Backbone):
    """DiT with adaLN-Zero: patch embedding, blocks, modulated zero-initialised head.

    The positions are computed from the patch indices instead of being read from a table, so the count of parameters is
    that of the paper's code less its frozen table. Labels equal to `num_classes` mean "no class".

    Source: Peebles and Xie 2023, arXiv:2212.09748. Deviations: text may join the conditioning vector (mean-pooled);
    QK-layernorm, (t, h, w) positions and rotary positions are options.
    """

    fsdp_units = (DiTLayer,)

    def __init__(self, config: DiTConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config = provider.config
        self.model_config = config
        self.provider = provider
        self.rotary = config.rotary(config.head_size) if config.position_embedding == "rope_3d" else None
        self.conditioner = Conditioner(config, provider)
        if stage.first:
            init = xavier_uniform(config.token_channels, config.hidden_size)
            self.embed = provider.replicated_linear(config.token_channels, config.hidden_size, bias=True, init=init)
        self.layers = nn.ModuleDict({str(i): DiTLayer(config, provider, attention) for i in stage.layers})
        if stage.last:
            self.head = FinalLayer(config.hidden_size, config.output_features, provider, eps=config.layernorm_epsilon)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        # Attention gets the rows of all tensor-parallel ranks, so rotary positions are those of the rows held before.
        rotation = None if self.rotary is None else self.rotary(batch.positions_T3)
        layout, (inputs_TC, positions_T3) = shard_rows(batch.layout, self.provider, inputs_TC, batch.positions_T3)
        cond_SD = self.conditioner(time_S, batch)
        if self.pre_process:
            x_TD = add_sincos(self._embed(inputs_TC, layout), positions_T3, self.model_config.position_embedding)
        else:
            x_TD = from_previous_stage(self.input_tensor)
        for layer in self.layers.values():
            x_TD = layer(x_TD, cond_SD, layout, rotation)
        if not self.post_process:
            return to_next_stage(x_TD)
        return gather_rows(self.head(x_TD, cond_SD, layout), self.provider)

    def _embed(self, inputs_TC: Tensor, layout: SequenceLayout) -> Tensor:
        if layout.valid_tokens < layout.total_tokens:
            # A padding row has no gradient, yet a NaN in it would reach the weights' gradients as 0 * NaN.
            inputs_TC = inputs_TC.masked_fill(~layout.valid_T[:, None], 0.0)
        return self.embed(inputs_TC.to(self.embed.weight.dtype))
