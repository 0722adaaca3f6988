"""Weights in and out: one line for each model class of diffusers that one of our backbones equals."""

DIFFUSERS = {
    "AutoencoderKL": "dit.convert.diffusers_autoencoder:DiffusersAutoencoder",
    "DiTTransformer2DModel": "dit.convert.diffusers_dit:DiffusersDiT",
    "FluxTransformer2DModel": "dit.convert.diffusers_flux:DiffusersFlux",
    "PixArtTransformer2DModel": "dit.convert.diffusers_pixart:DiffusersPixArt",
    "UNet2DConditionModel": "dit.convert.diffusers_unet:DiffusersUNet",
    "WanTransformer3DModel": "dit.convert.diffusers_wan:DiffusersWan",
}
