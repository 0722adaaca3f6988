"""Weights in and out: one line for each model class of diffusers that one of our backbones equals."""

DIFFUSERS = {
    "DiTTransformer2DModel": "dit.convert.diffusers_dit:DiffusersDiT",
    "PixArtTransformer2DModel": "dit.convert.diffusers_pixart:DiffusersPixArt",
}
