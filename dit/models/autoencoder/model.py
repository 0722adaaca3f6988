"""The KL and VQ autoencoders of latent diffusion, in the architecture of diffusers' `AutoencoderKL` and `VQModel`."""

from typing import Optional

import torch
from einops import rearrange
from torch import Tensor, nn

from dit.auxiliary import AuxiliaryNetworks
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.attention import Attention
from dit.layers.convolution import Convolution, GroupNorm
from dit.layers.picture_blocks import ResidualBlock
from dit.models.autoencoder.config import AutoencoderConfig
from dit.models.autoencoder.discriminator import Discriminator
from dit.models.autoencoder.layer import NORM_EPSILON, AttentionBlock, Codebook, MidBlock, resolutions, to_pictures
from dit.models.base import Backbone, Stage

LOG_VARIANCE_RANGE = (-30.0, 20.0)
"""Range to which the posterior's log variance is clamped, as in diffusers."""


class Encoder(nn.Module):
    """Maps pictures to mean and log variance of their latents, or to z, before the last projection."""

    def __init__(self, config: AutoencoderConfig, provider: LayerProvider) -> None:
        super().__init__()
        channels, groups = config.block_out_channels, config.norm_num_groups
        self.conv_in = Convolution(config.in_channels, channels[0], provider)
        self.down_blocks = resolutions(channels, config.layers_per_block, groups, provider, "down")
        self.mid_block = MidBlock(channels[-1], groups, provider, attention=config.mid_block_add_attention)
        self.conv_norm_out = GroupNorm(channels[-1], groups, provider, epsilon=NORM_EPSILON)
        self.conv_out = Convolution(channels[-1], config.encoded_channels, provider)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x_NCHW = self.conv_in(x_NCHW)
        for block in self.down_blocks:
            x_NCHW = block(x_NCHW)
        return self.conv_out(self.conv_norm_out(self.mid_block(x_NCHW), activate=True))


class Decoder(nn.Module):
    """Maps latents, after the first projection, to pictures."""

    def __init__(self, config: AutoencoderConfig, provider: LayerProvider) -> None:
        super().__init__()
        channels, groups = config.block_out_channels[::-1], config.norm_num_groups
        self.conv_in = Convolution(config.latent_channels, channels[0], provider)
        self.mid_block = MidBlock(channels[0], groups, provider, attention=config.mid_block_add_attention)
        self.up_blocks = resolutions(channels, config.layers_per_block + 1, groups, provider, "up")
        self.conv_norm_out = GroupNorm(channels[-1], groups, provider, epsilon=NORM_EPSILON)
        self.conv_out = Convolution(channels[-1], config.in_channels, provider)

    def forward(self, z_NCHW: Tensor) -> Tensor:
        x_NCHW = self.mid_block(self.conv_in(z_NCHW))
        for block in self.up_blocks:
            x_NCHW = block(x_NCHW)
        return self.conv_out(self.conv_norm_out(x_NCHW, activate=True))


class Autoencoder(Backbone):
    """Encoder, bottleneck at each position of the latent, and decoder.

    KL: the bottleneck is a normal posterior. The input of a token is its pixels, optionally followed by noise: the
    decoder gets mean + exp(log variance / 2) * noise, or the mean without noise. The output is the reconstruction,
    followed by mean and log variance.

    VQ: the bottleneck is a codebook. The input is the pixels; the decoder gets the entry e that is nearest to z. The
    output is the reconstruction, followed by z, e and the index of e.

    KL: pixels --> encoder --> quant_conv --> mean, log variance --> z --> post_quant_conv --> decoder --> pixels
    VQ: pixels --> encoder --> quant_conv --> z --> nearest entry e -----> post_quant_conv --> decoder --> pixels

    Source: Rombach et al. 2022, arXiv:2112.10752, appendix G; reparameterisation: Kingma and Welling 2014,
    arXiv:1312.6114, section 2.4; codebook: van den Oord et al. 2017, arXiv:1711.00937.
    """

    fsdp_units = (ResidualBlock, AttentionBlock)

    def __init__(self, config: AutoencoderConfig, provider: LayerProvider, attention: Attention, stage: Stage) -> None:
        super().__init__(stage)
        self.config = provider.config
        self.token_channels, self.latent_channels = config.token_channels, config.latent_channels
        self.patch, self.in_channels = config.patch_spatial, config.in_channels
        self.to_latent = Encoder(config, provider)
        self.quant_conv = Convolution(config.encoded_channels, config.encoded_channels, provider, size=1)
        self.codebook: Optional[Codebook] = None
        if config.codebook_size is not None:
            self.codebook = Codebook(config.codebook_size, config.latent_channels, provider)
        self.post_quant_conv = Convolution(config.latent_channels, config.latent_channels, provider, size=1)
        self.to_pixels = Decoder(config, provider)  # Megatron-Core treats an attribute `decoder` as its own layers

    def add_networks(self, auxiliary: AuxiliaryNetworks, provider: LayerProvider) -> None:
        super().add_networks(auxiliary, provider)
        if auxiliary.discriminator is not None:
            self.discriminator = Discriminator(self.in_channels, self.patch, auxiliary.discriminator, provider)
            # A hook, because data-parallel wrappers gather weights only in the forward pass.
            self.register_forward_hook(_append_scores)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        pixels_NhwC = batch.dense(inputs_TC).flatten(0, 1)
        encoded_NCHW = self._encoded(pixels_NhwC[..., : self.token_channels])
        if self.codebook is not None:
            z_NCHW, *chosen = self.codebook(encoded_NCHW)
            details = [encoded_NCHW, *chosen]
        else:
            noise_NhwC = pixels_NhwC[..., self.token_channels :][..., : self.latent_channels]
            mean_NCHW, log_variance_NCHW = encoded_NCHW.chunk(2, 1)
            log_variance_NCHW = log_variance_NCHW.clamp(*LOG_VARIANCE_RANGE)
            z_NCHW, details = mean_NCHW, [mean_NCHW, log_variance_NCHW]
            if noise_NhwC.shape[-1]:
                z_NCHW = mean_NCHW + torch.exp(log_variance_NCHW / 2) * noise_NhwC.permute(0, 3, 1, 2)
        outputs = (self.decode(z_NCHW), *(x.permute(0, 2, 3, 1) for x in details))
        return batch.layout.insert_padding(torch.cat(outputs, -1).flatten(0, 2))

    def encode(self, pixels_NhwC: Tensor) -> Tensor:
        """Return the latents that other models train on, `[N, C, h, w]`, float32: means, or z before quantisation."""
        return self._encoded(pixels_NhwC)[:, : self.latent_channels]

    def _encoded(self, pixels_NhwC: Tensor) -> Tensor:
        x_NCHW = to_pictures(pixels_NhwC, self.patch)
        return self.quant_conv(self.to_latent(x_NCHW.to(self.quant_conv.weight.dtype))).float()

    def decode(self, z_NCHW: Tensor) -> Tensor:
        """Return patches of pictures, `[N, h, w, token_channels]`, float32, from (quantised) latents."""
        p = self.patch
        x_NCHW = self.to_pixels(self.post_quant_conv(z_NCHW.to(self.post_quant_conv.weight.dtype)))
        return rearrange(x_NCHW.float(), "n c (h ph) (w pw) -> n h w (ph pw c)", ph=p, pw=p)


def _append_scores(autoencoder: Autoencoder, args: tuple[Tensor, Tensor, PackedBatch], prediction_TC: Tensor) -> Tensor:
    """Append the columns of `Discriminator.forward` to a prediction; each token has the values of its sample."""
    inputs_TC, _, batch = args
    pixels = (batch.dense(x_TC[:, : autoencoder.token_channels]).float() for x_TC in (inputs_TC, prediction_TC))
    return torch.cat([prediction_TC.float(), batch.layout.per_token(autoencoder.discriminator(*pixels))], 1)
