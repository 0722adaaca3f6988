"""Diffusion-backbone training on Megatron-Core. Importing this package imports nothing heavy."""

__version__ = "0.2.0.dev0"
