"""The conditional DDPM UNet: a small network for pictures of a few classes."""

from itertools import pairwise

from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import LABEL
from dit.kernels.attention import Attention
from dit.layers.convolution import Convolution, as_pictures, as_tokens
from dit.layers.embeddings import LabelEmbedder, timestep_features
from dit.models.base import Backbone, Stage
from dit.models.ddpm_unet.config import DDPMUNetConfig
from dit.models.ddpm_unet.layer import Block, DoubleConvolution, SelfAttention, concat_skip, halved

TIME_SCALE = 1000.0
"""Number of timesteps between time 0 and 1."""


class DDPMUNet(Backbone):
    """Blocks with attention on the way down and up, with skip connections at every resolution.

    channels 64-128-256-256 with a middle of 256-256:

        32 x 32   first 64 ----------------------------------------------------- concat 128 --> up 64 --> last
        16 x 16     '--> down 128 ------------------------------- concat 256 --> up 64 --'
        8 x 8              '--> down 256 --------- concat 512 --> up 128 --'
        4 x 4                     '--> down 256 --> middle 256 --'

    Every block adds a projection of the conditioning vector: the sinusoid of the step plus a learned vector of the
    class or of the unconditional case.

    Source: the UNet of github.com/dome272/Diffusion-Models-pytorch, with its parameters, shapes and formulas, after Ho
    et al. 2020, arXiv:2006.11239. Deviations: a learned vector for the unconditional case, for which that code adds
    nothing; cosines come before sines; biases of linear layers are zero-initialised.
    """

    fsdp_units = (DoubleConvolution, SelfAttention)

    def __init__(self, config: DDPMUNetConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config = provider.config
        self.condition_size = config.hidden_size
        channels, middle = config.block_out_channels, config.mid_out_channels

        def block(inputs: int, outputs: int, inner: int) -> Block:
            return Block(
                inputs,
                outputs,
                config.hidden_size,
                config.num_attention_heads,
                provider,
                attention,
                middle=inner,
            )

        self.label = (
            None if config.num_classes is None else LabelEmbedder(config.num_classes, config.hidden_size, provider)
        )
        self.first = DoubleConvolution(config.token_channels, channels[0], provider)
        self.down_blocks = nn.ModuleList(block(before, after, after) for before, after in pairwise(channels))
        self.mid_blocks = nn.ModuleList(
            DoubleConvolution(before, after, provider) for before, after in pairwise([channels[-1], *middle])
        )
        self.up_blocks, width = nn.ModuleList(), middle[-1]
        for level in reversed(range(len(channels) - 1)):
            inputs = channels[level] + width
            width = channels[max(level - 1, 0)]  # the width of the next block's skip connection
            self.up_blocks.append(block(inputs, width, inputs // 2))
        self.last = Convolution(width, config.output_features, provider, size=1)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        x_NCHW = as_pictures(inputs_TC.to(self.last.weight.dtype), batch)
        cond_SD = timestep_features(time_S.double() * TIME_SCALE, self.condition_size).to(x_NCHW.dtype)
        if self.label is not None:
            cond_SD = cond_SD + self.label(batch.conditions[LABEL.name].values)
        cond_ND = cond_SD.repeat_interleave(len(x_NCHW) // len(cond_SD), 0)
        x_NCHW, skips = self.first(x_NCHW), []
        for block in self.down_blocks:
            skips.append(x_NCHW)
            x_NCHW = block(halved(x_NCHW), cond_ND)
        for block in self.mid_blocks:
            x_NCHW = block(x_NCHW)
        for block in self.up_blocks:
            x_NCHW = block(concat_skip(x_NCHW, skips.pop()), cond_ND)
        return as_tokens(self.last(x_NCHW), batch)
