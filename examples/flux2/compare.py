"""Draw pictures by `launch.sample` and by the exported pipeline of diffusers: `python -m examples.flux2.compare`.

Both start from the same noise and have the same number of steps and guidance. The picture in `--out` shows the pairs;
the command fails if a pixel differs by more than one step of 255.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from dit.encoders.pretrained import load_without_code
from dit.encoders.text import load_text_encoders
from dit.encoders.text_config import as_conditions
from dit.encoders.vae import VAE
from dit.errors import ConfigError, one_line_errors
from dit.inference.generator import Generator, load_generator
from dit.objectives.addressed_noise import AddressedNoise
from dit.patchify import unpatchify
from dit.sampling.generate import empty_pack
from dit.sampling.grid import image_grid, save_png
from dit.terminal import echo
from launch import environment

LARGEST = 1 / 255
"""Largest difference of a pixel in [0, 1]."""


def start_noise(generator: Generator, conditions: Mapping[str, Any]) -> Tensor:
    """Return the noise from which samples of the training size start, `[N, C, T, H, W]`.

    Args:
        conditions: by name, a value for each sample.
    """
    frames, height, width = generator.latent_size
    patch, count = generator.spec.patch, len(next(iter(conditions.values())))
    batch = empty_pack(generator.spec, generator.latent_size, count, torch.device("cpu"), conditions)
    noise = AddressedNoise(generator.config.sampling.seed, 0, batch.sample_ids_S, batch.layout)
    tokens_TC = noise.normal_TC("start", batch.latents_TC.shape[1])
    grid = (frames // patch[0], height // patch[1], width // patch[1])
    return torch.stack([unpatchify(part, grid, *patch) for part in tokens_TC.chunk(count)])


def draw_both(run: Path, folder: Path, prompts: list[str], steps: int, guidance_scale: float) -> tuple[Tensor, Tensor]:
    """Return the pictures of a run and of its pipeline in [0, 1], `[N, 3, H, W]`."""
    generator = load_generator(run)
    conditions = as_conditions(
        load_text_encoders(generator.text_encoder or "").encode(prompts), generator.spec.conditions
    )
    latents = generator.generate(conditions=conditions, solver="euler", num_steps=steps, guidance_scale=guidance_scale)
    options = {"pretrained_model_name_or_path": str(folder), "use_safetensors": True}
    pipeline = load_without_code(DiffusionPipeline, f"pipeline {folder}", **options)
    pipeline.set_progress_bar_config(disable=True)
    pictures = VAE(str(folder / "vae")).decode(latents.cpu())[:, :, 0] / 2 + 0.5
    found = pipeline(
        prompt=prompts,
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
        height=pictures.shape[-2],
        width=pictures.shape[-1],
        latents=pipeline._patchify_latents(start_noise(generator, conditions)[:, :, 0]),
        output_type="pt",
    ).images
    return pictures, found


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="examples.flux2.compare", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="run of a FLUX.2 klein model")
    parser.add_argument("--pipeline", type=Path, required=True, metavar="DIR", help="its export, --format pipeline")
    parser.add_argument("--prompt", nargs="+", required=True, metavar="TEXT")
    parser.add_argument("--steps", type=int, default=20, metavar="N")
    parser.add_argument("--guidance-scale", type=float, default=3.0, metavar="X")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG", help="launch.sample above, diffusers below")
    args = parser.parse_args(argv)
    environment.prepare(quiet=True)
    ours, theirs = draw_both(args.checkpoint, args.pipeline, args.prompt, args.steps, args.guidance_scale)
    pairs = torch.cat([ours, theirs]) * 2 - 1
    save_png(image_grid(pairs, [*args.prompt, *args.prompt], columns=len(args.prompt)), args.out)
    difference = float((ours - theirs).abs().max())
    echo(f"{args.out}: {len(ours)} pairs, the largest difference of a pixel is {difference:.1e}")
    if difference > LARGEST:
        raise ConfigError(f"the pictures differ by {difference:.3f}, more than {LARGEST:.4f}; export the run again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
