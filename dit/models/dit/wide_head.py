"""A head of wide layers that also read the noised latent."""

from typing import Optional

from torch import Tensor, nn

from dit.backends.init import xavier_uniform
from dit.backends.provider import LayerProvider
from dit.kernels.attention import Attention
from dit.kernels.rope import Rotation
from dit.layers.adaln import RMSNorm
from dit.layers.heads import FinalLayer
from dit.layers.tokens import PatchEmbedding
from dit.layout import SequenceLayout
from dit.models.dit.config import DiTConfig
from dit.models.dit.layer import DiTLayer


class WideHead(nn.Module):
    """A few wide DiT blocks and the output layer, with a separate conditioning vector for every token.

        noised latent ------------------------ linear --> block --> ... --> block --> norm, linear --> prediction
                                                            ^                 ^            ^
        tokens of the body + time -- SiLU, linear --> c ----+-----------------+------------+

    The last pipeline stage has the head; every stage receives the noised latent. Under sequence parallelism each rank
    modulates its local tokens, so the weights of the modulations are replicated.

    Source: Zheng et al. 2025 (RAE), arXiv:2510.11690, section 5, after Wang et al. 2025 (DDT), arXiv:2504.05741, and
    the published code. Deviation: the inner width of the MLPs is rounded up to a multiple of 64.
    """

    def __init__(self, config: DiTConfig, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        wide, eps = config.head_layers(), config.layernorm_epsilon
        size, init = wide.hidden_size, xavier_uniform(config.hidden_size, wide.hidden_size)
        self.rotary = wide.rotary()
        self.condition = provider.replicated_linear(config.hidden_size, size, bias=True, init=init)
        self.embed = PatchEmbedding(config.token_channels, size, provider)
        self.layers = nn.ModuleDict(
            {str(i): DiTLayer(wide, provider, attention, per_token=True) for i in range(wide.num_layers)}
        )
        norm = RMSNorm(size, provider, eps=eps) if config.rms_norm else None
        self.final = FinalLayer(size, config.output_features, provider, eps=eps, norm=norm)

    def forward(self, x_TD: Tensor, inputs: tuple[Tensor, Tensor, Tensor], layout: SequenceLayout) -> Tensor:
        """Return the prediction of the local tokens, `[T, channels]`.

        Args:
            inputs: embedding of the time of each noise level; noised latents of the local tokens; (t, h, w) patch
                index of the tokens of all tensor-parallel ranks.
        """
        time_LD, inputs_TC, positions_T3 = inputs
        rotation: Optional[Rotation] = None if self.rotary is None else self.rotary(positions_T3)
        count = layout.num_local_tokens
        rows = SequenceLayout((1,) * count, (1,) * count, count, layout.device)  # every token has its own modulation
        cond_TD = self.condition(nn.functional.silu(x_TD + layout.level_layout.per_token(time_LD)))
        y_TD = self.embed(inputs_TC, layout)
        for layer in self.layers.values():
            y_TD = layer(y_TD, cond_TD, layout, rotation, None, rows)
        out_TC: Tensor = self.final(y_TD, cond_TD, rows)
        return out_TC
