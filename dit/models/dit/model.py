"""The original DiT on Megatron-Core linears."""

from collections import OrderedDict
from typing import Any, Optional

from torch import Tensor, nn

from dit.backends.init import Init, xavier_uniform
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.attention import Attention
from dit.layers.adaln import LayerNorm, RMSNorm
from dit.layers.conditioner import Conditioner
from dit.layers.heads import FinalLayer
from dit.layers.tokens import ClassTokens, embed_patches
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.dit.config import DiTConfig
from dit.models.dit.layer import DiTLayer, WideHead
from dit.models.token_stack import TokenStack


class DiT(TokenStack[DiTConfig]):
    """DiT with adaLN-Zero: patch embedding, blocks, modulated zero-initialised head.

    Positions are computed from the patch indices instead of stored in a table, so the model has the parameters of the
    paper's code without its frozen table. The label `num_classes` is the unconditional case.

    Source: Peebles and Xie 2023, arXiv:2212.09748. Deviations: mean-pooled text in the conditioning vector,
    QK-layernorm, (t, h, w) positions, rotary positions, the bottleneck, class tokens, RMSNorm and SwiGLU of JiT (Li and
    He 2025, arXiv:2511.13720), the teacher's token of REG (Wu et al. 2025, arXiv:2507.01467), the wide head of RAE
    (Zheng et al. 2025, arXiv:2510.11690), and the value residual of SR-DiT (Bhanded 2025, arXiv:2512.12386) are
    options.
    """

    embed: nn.Linear
    bottleneck: Optional[nn.Linear]
    fsdp_units = (DiTLayer,)

    def __init__(self, config: DiTConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(config, provider, stage, attention)
        size = config.hidden_size
        self.conditioner = Conditioner(
            size,
            provider,
            time_scale=config.time_scale,
            frequency_shift=config.time_frequency_shift,
            num_classes=config.num_classes,
            context_size=config.context_size,
            interval=config.interval_conditioning,
        )
        if config.class_tokens is not None:
            count, first_layer = config.class_tokens
            self.middle = range(first_layer, config.num_layers)
            received, inserted = stage.layers.start > first_layer, first_layer in stage.layers
            others = int(config.teacher_token_size is not None)
            self.class_tokens = ClassTokens(count, size, provider, received=received, inserted=inserted, others=others)
        self.teacher_features = config.teacher_token_size or 0
        if stage.first and self.teacher_features:
            features = self.teacher_features
            linear = provider.replicated_linear(features, size, bias=True, init=xavier_uniform(features, size))
            layer_norm = LayerNorm(size, provider, eps=1e-6)  # as in the code of REG
            self.teacher_token = nn.Sequential(OrderedDict(linear=linear, norm=layer_norm))
        self.bottleneck = None
        if stage.first:
            inputs = config.token_channels
            if config.bottleneck_size is not None:
                init, inputs = xavier_uniform(inputs, config.bottleneck_size), config.bottleneck_size
                self.bottleneck = provider.replicated_linear(config.token_channels, inputs, bias=False, init=init)
            self.embed = provider.replicated_linear(inputs, size, bias=True, init=xavier_uniform(inputs, size))
        first = 0 if config.value_residual else None
        self.layers = nn.ModuleDict(
            {str(i): DiTLayer(config, provider, attention, returns_values=i == first) for i in stage.layers}
        )
        if config.value_residual:
            init = Init("constant", 0.5)
            self.value_weights = provider.parameter((config.num_layers - 1,), init, gradient_covers="all_tokens")
        if stage.last and config.wide_head is not None:
            self.head = WideHead(config, provider, attention)
        elif stage.last:
            eps = config.layernorm_epsilon
            norm = RMSNorm(size, provider, eps=eps) if config.rms_norm else None
            features = config.output_features + self.teacher_features
            self.head = FinalLayer(size, features, provider, eps=eps, norm=norm)

    def layer_inputs(
        self, cond_SD: Tensor, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch
    ) -> tuple[Any, ...]:
        return cond_SD, layout, self.rotation(batch)

    def head_input(self, cond_SD: Tensor, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Any:
        if self.model_config.wide_head is None:
            return cond_SD
        time_LD = self.conditioner.time(time_S if time_S.dim() == 1 else time_S[:, 0])
        return time_LD, inputs_TC, batch.positions_T3

    def embed_tokens(self, inputs_TC: Tensor, layout: SequenceLayout) -> Tensor:
        if self.bottleneck is None:
            return embed_patches(self.embed, inputs_TC, layout)
        return self.embed(embed_patches(self.bottleneck, inputs_TC, layout))
