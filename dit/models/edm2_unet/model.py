"""The EDM2 UNet: a magnitude-preserving network for pictures or latents of classes."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from dit.backends.init import ZEROS
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import LABEL
from dit.errors import BatchError
from dit.kernels.attention import Attention
from dit.layers.convolution import as_pictures, as_tokens
from dit.layers.uncertainty import fourier_features
from dit.models.base import Backbone, Stage
from dit.models.edm2_unet.config import EDM2UNetConfig
from dit.models.edm2_unet.layer import Block, UnitWeight, Way, mp_cat, mp_silu, mp_sum

CLASS_SHARE = 0.5
"""Weight of the class in the conditioning vector; that of the noise level is the rest."""


class EDM2UNet(Backbone):
    """Residual blocks on the way down and up; each output on the way down is a skip connection.

    channels 192-384-576-768; `r192` is a block of 192 channels that resamples, `576a x 3` are three with attention:

        64 x 64   first, 192 x 3 ------------------------------------------------ r384, 192 x 4 --> last
        32 x 32     '--> r192, 384 x 3 --------------------------- r576, 384 x 4 --'
        16 x 16            '--> r384, 576a x 3 ---- r768, 576a x 4 --'
        8 x 8                     '--> r576, 768a x 3, 768a, 768, 768a x 4 --'

    Source: Karras et al. 2024 (EDM2), arXiv:2312.02696, config G. Deviations: frequencies and phases of the noise level
    are those of `fourier_features`, which are not random; the unconditional case is one more class.
    """

    fsdp_units = (Block,)

    def __init__(self, config: EDM2UNetConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config, self.side_multiple = provider.config, config.side_multiple
        channels, width = config.block_out_channels, config.condition_size
        x = self.noise_features = channels[0]
        self.noise = UnitWeight(x, width, provider)
        self.label = None if config.num_classes is None else UnitWeight(config.num_classes + 1, width, provider)

        def block(inputs: int, outputs: int, way: Way, *, resample: bool = False, attends: bool = False) -> Block:
            return Block(inputs, outputs, config, provider, attention, way=way, resample=resample, attends=attends)

        self.first = UnitWeight(config.token_channels + 1, x, provider, size=3)
        self.down, self.up, skips = nn.ModuleList(), nn.ModuleList(), [x]
        for level, outputs in enumerate(channels):
            if level:
                self.down.append(block(x, x, "down", resample=True))
                skips.append(x)
            for _ in range(config.layers_per_block):
                self.down.append(block(x, outputs, "down", attends=level in config.attention_levels))
                skips.append(x := outputs)
        self.middle = nn.ModuleList([block(x, x, "up", attends=True), block(x, x, "up")])
        for level, outputs in reversed(list(enumerate(channels))):
            for _ in range(config.layers_per_block + 1):
                self.up.append(block(x + skips.pop(), outputs, "up", attends=level in config.attention_levels))
                x = outputs
            if level:
                self.up.append(block(x, x, "up", resample=True))
        self.last = UnitWeight(x, config.output_features, provider, size=3)
        self.gain = provider.parameter((1,), ZEROS, dtype=torch.float32)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        x_NCHW = as_pictures(inputs_TC.to(self.first.weight.dtype), batch)
        height, width = x_NCHW.shape[-2:]
        if height % self.side_multiple or width % self.side_multiple:
            raise BatchError(
                f"the lowest resolution of this UNet is 1/{self.side_multiple}, and a picture has {height} x {width} "
                f"tokens; use sides that are multiples of {self.side_multiple}, or fewer levels in "
                "model.block_out_channels"
            )
        frames = len(x_NCHW) // batch.layout.num_samples
        cond_NE = self._condition(time_S, batch).repeat_interleave(frames, 0)
        x_NCHW = self.first(pad(x_NCHW, (0, 0, 0, 0, 0, 1), value=1.0))  # the channel of ones replaces biases
        skips = [x_NCHW]
        for block in self.down:
            skips.append(block(skips[-1], cond_NE))
        x_NCHW = skips[-1]
        for block in self.middle:
            x_NCHW = block(x_NCHW, cond_NE)
        for block in self.up:
            x_NCHW = block(x_NCHW if block.resample else mp_cat(x_NCHW, skips.pop()), cond_NE)
        return as_tokens(self.last(x_NCHW, self.gain), batch)

    def _condition(self, time_S: Tensor, batch: PackedBatch) -> Tensor:
        features_SF = fourier_features(time_S, self.noise_features).to(self.noise.weight.dtype)
        cond_SE = self.noise(features_SF)
        if self.label is not None:
            # A one-hot vector times the root of its length has mean square 1; it selects a column of the weight.
            columns_LE = self.label.scaled(math.sqrt(self.label.weight.shape[1])).T
            label_SE = embedding(batch.conditions[LABEL.name].values, columns_LE)
            cond_SE = mp_sum(cond_SE, label_SE, CLASS_SHARE)
        return mp_silu(cond_SE)
