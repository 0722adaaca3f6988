"""A small UNet outside the packages, in one file, which the library must train like one of its backbones.

A recipe has its config, and the config names the network in `model_path`; no other code refers to it.
"""

from dataclasses import dataclass
from typing import ClassVar, Optional

import nemo_run as run
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, group_norm, interpolate, silu

from dit.backends.init import ONES, ZEROS, Init, normal
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import LABEL
from dit.errors import ConfigError
from dit.kernels.attention import Attention
from dit.layers.embeddings import LabelEmbedder, TimestepEmbedder
from dit.models.base import PICTURES, Backbone, Stage, TransformerSizes
from dit.models.conditioned import ClassConditioned
from dit.training.pretrain import pretrain
from energon_data.mock import MockData
from recipes.tiny import tiny_dit


@dataclass(kw_only=True)
class UNetConfig(ClassConditioned):
    """A UNet of two resolutions, conditioned on time and class.

    Attributes:
        hidden_size: channels at full resolution; doubled at half resolution.
        norm_groups: groups of the group norms.
    """

    model_path: ClassVar[Optional[str]] = f"{__name__}:UNet"
    supports = PICTURES

    patch_spatial: int = 1
    num_classes: Optional[int] = 10
    hidden_size: int = 16
    norm_groups: int = 4

    def validate(self) -> None:
        if self.hidden_size % self.norm_groups:
            raise ConfigError(
                f"model.hidden_size={self.hidden_size} is not a multiple of model.norm_groups={self.norm_groups}; "
                f"use {self.hidden_size // self.norm_groups * self.norm_groups or self.norm_groups}"
            )

    def megatron_sizes(self) -> TransformerSizes:
        return TransformerSizes(num_layers=1, hidden_size=self.hidden_size, num_attention_heads=1)


class Convolution(nn.Module):
    """A convolution of 3 x 3."""

    def __init__(
        self, inputs: int, outputs: int, provider: LayerProvider, *, stride: int = 1, init: Optional[Init] = None
    ) -> None:
        super().__init__()
        self.stride = stride
        self.weight = provider.parameter((outputs, inputs, 3, 3), init or normal((9 * inputs) ** -0.5))
        self.bias = provider.parameter((outputs,), ZEROS)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return conv2d(x_NCHW, self.weight, self.bias, stride=self.stride, padding=1)


class Norm(nn.Module):
    """A group norm."""

    def __init__(self, channels: int, groups: int, provider: LayerProvider) -> None:
        super().__init__()
        self.groups = groups
        self.weight = provider.parameter((channels,), ONES)
        self.bias = provider.parameter((channels,), ZEROS)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return group_norm(x_NCHW, self.groups, self.weight, self.bias)


class ResidualBlock(nn.Module):
    """Two convolutions after norms, with the conditioning vector added between them, and a projected shortcut."""

    def __init__(self, inputs: int, outputs: int, config: UNetConfig, provider: LayerProvider) -> None:
        super().__init__()
        self.norm_1 = Norm(inputs, config.norm_groups, provider)
        self.convolution_1 = Convolution(inputs, outputs, provider)
        self.condition = provider.replicated_linear(config.hidden_size, outputs, bias=True, init=normal(0.1))
        self.norm_2 = Norm(outputs, config.norm_groups, provider)
        self.convolution_2 = Convolution(outputs, outputs, provider)
        self.beside = provider.parameter((outputs, inputs, 1, 1), normal(inputs**-0.5))

    def forward(self, x_NCHW: Tensor, cond_ND: Tensor) -> Tensor:
        y_NCHW = self.convolution_1(silu(self.norm_1(x_NCHW))) + self.condition(cond_ND)[:, :, None, None]
        return conv2d(x_NCHW, self.beside) + self.convolution_2(silu(self.norm_2(y_NCHW)))


class UNet(Backbone):
    """Three blocks: down, middle and up; the last also reads the output of the first.

    full resolution   first --> down --------------------- skip --------------------> up --> last
                                 |                                                    |
    half                         +--> shrink --> middle --> nearest --> enlarge
    """

    fsdp_units = (ResidualBlock,)

    def __init__(self, config: UNetConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config = provider.config
        size, channels = config.hidden_size, config.token_channels
        self.time = TimestepEmbedder(size, provider, time_scale=1000.0)
        self.label = LabelEmbedder(config.num_classes, size, provider) if config.num_classes else None
        self.first = Convolution(channels, size, provider)
        self.down = ResidualBlock(size, size, config, provider)
        self.shrink = Convolution(size, 2 * size, provider, stride=2)
        self.middle = ResidualBlock(2 * size, 2 * size, config, provider)
        self.enlarge = Convolution(2 * size, size, provider)
        self.up = ResidualBlock(2 * size, size, config, provider)
        self.norm = Norm(size, config.norm_groups, provider)
        self.last = Convolution(size, config.output_features, provider, init=ZEROS)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        pictures = batch.dense(inputs_TC.to(self.first.weight.dtype))  # [S, t, h, w, C]
        cond_SD = self.time(time_S)
        if self.label is not None:
            cond_SD = cond_SD + self.label(batch.conditions[LABEL.name].values)
        cond_ND = silu(cond_SD).repeat_interleave(pictures.shape[1], 0)
        skip = self.down(self.first(pictures.flatten(0, 1).permute(0, 3, 1, 2)), cond_ND)
        x_NCHW = self.middle(self.shrink(skip), cond_ND)
        x_NCHW = self.enlarge(interpolate(x_NCHW, skip.shape[-2:]))
        x_NCHW = self.up(torch.cat([x_NCHW, skip], 1), cond_ND)
        out_NCHW = self.last(silu(self.norm(x_NCHW)))
        return batch.layout.insert_padding(out_NCHW.permute(0, 2, 3, 1).flatten(0, 2))


@run.cli.factory(target=pretrain)
def trial_unet() -> run.Partial:
    """A UNet on synthetic pictures of 8 x 8, four in a micro-batch, on one CPU core."""
    recipe = tiny_dit()
    recipe.model = run.Config(UNetConfig)
    recipe.data = run.Config(MockData, shapes=["1x8x8"], num_streams=2)
    recipe.training.run_dir = "runs/trial_unet"
    return recipe
