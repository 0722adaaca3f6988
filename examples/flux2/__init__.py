"""A small FLUX.2 with random encoders, from training to the pipeline of diffusers."""
