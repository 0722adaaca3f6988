"""Diffusion-backbone training on Megatron-Core. Importing this package imports nothing heavy."""

from dit import lean_imports

__version__ = "0.1.0"

lean_imports.install()
