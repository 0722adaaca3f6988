"""Conversion of weights. `DIFFUSERS` has a line for each diffusers class that corresponds to a backbone."""

DIFFUSERS = {
    "AutoencoderKL": "dit.convert.diffusers_autoencoder:DiffusersAutoencoder",
    "ChromaTransformer2DModel": "dit.convert.diffusers_flux:DiffusersChroma",
    "DiTTransformer2DModel": "dit.convert.diffusers_dit:DiffusersDiT",
    "Flux2Transformer2DModel": "dit.convert.diffusers_flux:DiffusersFlux2",
    "FluxTransformer2DModel": "dit.convert.diffusers_flux:DiffusersFlux",
    "HunyuanVideo15Transformer3DModel": "dit.convert.diffusers_hunyuan_video:DiffusersHunyuanVideo",
    "Lumina2Transformer2DModel": "dit.convert.diffusers_sandwich:DiffusersLumina2",
    "PRXTransformer2DModel": "dit.convert.diffusers_prx:DiffusersPRX",
    "PixArtTransformer2DModel": "dit.convert.diffusers_cross:DiffusersPixArt",
    "QwenImageTransformer2DModel": "dit.convert.diffusers_flux:DiffusersQwenImage",
    "SD3Transformer2DModel": "dit.convert.diffusers_sd3:DiffusersSD3",
    "SanaTransformer2DModel": "dit.convert.diffusers_cross:DiffusersSana",
    "UNet2DConditionModel": "dit.convert.diffusers_unet:DiffusersUNet",
    "VQModel": "dit.convert.diffusers_autoencoder:DiffusersVQModel",
    "WanTransformer3DModel": "dit.convert.diffusers_cross:DiffusersWan",
    "ZImageTransformer2DModel": "dit.convert.diffusers_sandwich:DiffusersZImage",
}
