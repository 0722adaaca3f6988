"""The UNet of latent diffusion, in the architecture of Stable Diffusion v1 and XL and of `UNet2DConditionModel`."""

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from dit.backends.init import ZEROS
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.attention import Attention
from dit.layers.convolution import Convolution, GroupNorm, as_pictures, as_tokens
from dit.layers.embeddings import TimestepEmbedder
from dit.layers.picture_blocks import BlockConditions, ResidualBlock
from dit.layers.text import TextTokens
from dit.layers.tokens import with_control
from dit.models.base import Backbone, Stage
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.models.ldm_unet.layer import NORM_EPSILON, AddedEmbedding, Blocks, SpatialTransformer

TIME_SCALE = 1000.0
"""Number of timesteps between time 0 and 1."""


class Down(Blocks):
    """The blocks of one resolution on the way down, then downsampling except at the lowest resolution."""

    def __init__(
        self, inputs: int, level: int, config: LDMUNetConfig, provider: LayerProvider, attention: Attention
    ) -> None:
        outputs, layers = config.block_out_channels[level], config.transformer_layers[level]
        widths = [inputs, *[outputs] * (config.layers_per_block - 1)]
        super().__init__(widths, outputs, layers, config, provider, attention)
        self.downsampler: Optional[Convolution] = None
        if level < len(config.block_out_channels) - 1:
            self.downsampler = Convolution(outputs, outputs, provider, stride=2)

    def forward(self, x_NCHW: Tensor, conditions: BlockConditions) -> list[Tensor]:
        """Return the output of every block, and the downsampled output."""
        outputs = [x_NCHW]
        for i in range(len(self.resnets)):
            outputs.append(self.block(i, outputs[-1], conditions))
        if self.downsampler is not None:
            outputs.append(self.downsampler(outputs[-1]))
        return outputs[1:]


class Up(Blocks):
    """The blocks of one resolution on the way up, each with a concatenated skip input, then upsampling."""

    def __init__(
        self,
        inputs: int,
        skips: list[int],
        level: int,
        config: LDMUNetConfig,
        provider: LayerProvider,
        attention: Attention,
    ) -> None:
        outputs, layers = config.block_out_channels[level], config.transformer_layers[level]
        main = [inputs, *[outputs] * config.layers_per_block]
        widths = [width + skip for width, skip in zip(main, skips, strict=True)]
        super().__init__(widths, outputs, layers, config, provider, attention)
        self.upsampler = Convolution(outputs, outputs, provider) if level else None

    def forward(self, x_NCHW: Tensor, skips: list[Tensor], conditions: BlockConditions) -> Tensor:
        """Run the blocks; each removes its skip input from the end of `skips`."""
        for i in range(len(self.resnets)):
            x_NCHW = self.block(i, torch.cat([x_NCHW, skips.pop()], 1), conditions)
        if self.upsampler is None:
            return x_NCHW
        return self.upsampler(interpolate(x_NCHW, skips[-1].shape[-2:]))


class LDMUNet(Backbone):
    """Residual blocks and transformers, with skip connections from every output on the way down to the way up.

    Two resolutions with one block each (layers_per_block=1):

        conv_in -+-> block -+-------------------------------------> block --> block --> norm, SiLU, conv_out
                 |          |                                         ^         ^
                 |          '-> down -+-> block -+-> middle           | up      | conv_in's
                 |                    |          |     v              |         |
                 |                    |          '-> block --> block -'         |
                 |                    '------------------^                      |
                 '--------------------------------------------------------------'

    Source: Rombach et al. 2022, arXiv:2112.10752, in the sizes of github.com/CompVis/stable-diffusion
    (`v1-inference.yaml`). Deviations: a learned null token replaces dropped texts, unless `null_text=empty`, as in that
    code; texts have their true lengths unless their padding is stored; biases of linear layers are zero-initialised.
    """

    fsdp_units = (ResidualBlock, SpatialTransformer)

    def __init__(self, config: LDMUNetConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config = provider.config
        channels, levels = config.block_out_channels, range(len(config.block_out_channels))
        first, last, layers = channels[0], channels[-1], config.layers_per_block
        self.time = TimestepEmbedder(config.condition_size, provider, time_scale=TIME_SCALE, features=first)
        self.text = TextTokens(config.text_size(), provider, learned_null=config.null_text == "learned")
        self.added: Optional[AddedEmbedding] = None
        if config.pooled_size is not None:
            self.added = AddedEmbedding(config.pooled_size, config.condition_size, provider)
        self.input_features = config.input_features
        self.conv_in = Convolution(self.input_features, first, provider)
        skips = [first]
        self.down_blocks = nn.ModuleList()
        for level in levels:
            self.down_blocks.append(Down(skips[-1], level, config, provider, attention))
            skips += [channels[level]] * (layers + (level < levels[-1]))
        self.mid_block = Blocks(
            [last, last], last, config.mid_transformer_layers, config, provider, attention, transformers=1
        )
        self.up_blocks, width = nn.ModuleList(), last
        for level in reversed(levels):
            level_skips = [skips.pop() for _ in range(layers + 1)]
            self.up_blocks.append(Up(width, level_skips, level, config, provider, attention))
            width = channels[level]
        self.conv_norm_out = GroupNorm(first, config.norm_num_groups, provider, epsilon=NORM_EPSILON)
        self.conv_out = Convolution(first, config.output_features, provider, init=ZEROS)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        inputs_TC = with_control(inputs_TC, batch, self.input_features)
        x_NCHW = as_pictures(inputs_TC.to(self.conv_in.weight.dtype), batch)
        frames = len(x_NCHW) // len(time_S)
        context_KD, texts = self.text(batch)
        cond_SD = self.time(time_S)
        if self.added is not None:
            cond_SD = cond_SD + self.added(batch)
        conditions = BlockConditions(cond_SD.repeat_interleave(frames, 0), context_KD, texts, frames=frames)
        skips = [self.conv_in(x_NCHW)]
        for down in self.down_blocks:
            skips += down(skips[-1], conditions)
        x_NCHW = skips[-1]
        for i in range(len(self.mid_block.resnets)):
            x_NCHW = self.mid_block.block(i, x_NCHW, conditions)
        for up in self.up_blocks:
            x_NCHW = up(x_NCHW, skips, conditions)
        return as_tokens(self.conv_out(self.conv_norm_out(x_NCHW, activate=True)), batch)
