"""Diffusion-backbone training on Megatron-Core. Importing this package imports nothing heavy."""

__version__ = "0.1.0"
