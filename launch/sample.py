"""Draw samples from a checkpoint: `python -m launch.sample --checkpoint runs/letters_dit --out samples.png`.

The ending of `--out` selects the format: `.png` shows the frames of clips in rows, `.gif` and `.mp4` play them. Under
torchrun, the samples are distributed over the ranks; they do not depend on the number of ranks.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, get_args, get_type_hints

from torch import Tensor
from tqdm import tqdm

from dit.backends.device import local_device
from dit.data_api import NoData
from dit.encoders.pretrained import recorded_name
from dit.encoders.vae import Geometry
from dit.errors import CheckpointError, ConfigError, one_line_errors
from dit.inference.decoding import Decoder, find_autoencoder
from dit.inference.drawing import batches, draw
from dit.inference.gallery import Gallery, check_ending, default_clip_ending
from dit.inference.sizes import check_size
from dit.ranges import ASPECTS, COUNT_OR_ZERO, FINITE, POSITIVE, SEED
from dit.sampling.clips import CLIP_WRITERS
from dit.settings import SamplingConfig
from dit.terminal import counted, echo
from launch import environment
from launch.argument_types import at_least_one, command_parser, height_and_width, number_in
from launch.cascade import add_cascade_arguments, read_pictures, stages_of, with_pictures
from launch.initial_picture import (
    add_pictures,
    check_strength,
    check_trained,
    read_initial,
    read_inpainting,
    read_reference,
)
from launch.sample_requests import add_request_arguments, what_to_draw

if TYPE_CHECKING:
    from dit.backends.process_groups import ProcessGroups
    from dit.inference.generator import Generator

SOLVERS, VARIANCES, THRESHOLDINGS = (
    get_args(get_type_hints(SamplingConfig)[name]) for name in ("solver", "variance", "thresholding")
)
TILES = ("tile", "tile_overlap")
"""Keyword arguments of `generate` without a setting of the run."""
SETTINGS = (
    *("solver", "variance", "guidance_scale", "guidance_channels", "guidance_rescale", "guidance_norm"),
    *("guidance_interval", "churn", "thresholding", "seed", "fps", *TILES),
)
"""Keyword arguments of `generate` that are flags of the same name."""
DESCRIPTION = "Draw samples from a checkpoint as one labelled picture or animation, and as separate files."
EXAMPLES = """\
examples
  python -m launch.sample --checkpoint runs/letters_dit                       every class once, samples.png
  python -m launch.sample --checkpoint runs/letters_dit --labels H,E,L,L,O --columns 5 --out hello.png
  python -m launch.sample --checkpoint runs/moving_letters_dit --prompt "the letter Q moving left fast" --out q.gif
  python -m launch.sample --checkpoint RUN --prompts prompts.txt --size 512x768 --vae VAE --files pictures
  python -m launch.sample --cascade base=RUN_64 sr256=RUN_256 --stage sr256 steps=20 --prompt "a red kite"
  python -m launch.sample --checkpoint RUN --prompt "a red train" --init sketch.png --strength 0.6
  python -m launch.sample --checkpoint runs/letters_edit --reference q.png --prompt "make it bold" --out bold.png
  python -m launch.sample --checkpoint RUN --inpaint street.png mask.png --prompt "a red train" --out train.png
  python -m launch.sample --checkpoint HIGH --low-noise LOW --prompt "a red train" --out train.mp4
  torchrun --standalone --nproc-per-node 8 -m launch.sample --checkpoint RUN --prompts prompts.jsonl --files pictures
"""


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select a checkpoint, or a cascade of them, and the sampling settings."""
    flag = parser.add_argument_group("sampling", "defaults are those of the run").add_argument
    number, count = partial(flag, type=number_in(FINITE), metavar="X"), partial(flag, type=at_least_one, metavar="N")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", metavar="DIR", help="run folder, or one checkpoint in it")
    source.add_argument("--cascade", nargs="+", metavar="NAME=DIR", help="several; each enlarges the previous pictures")
    add_cascade_arguments(parser)
    parser.add_argument("--raw-weights", action="store_true", help="use the raw weights instead of their average (EMA)")
    flag("--solver", choices=SOLVERS, help="integrator of the sampling ODE or SDE")
    count("--steps", help="solver steps")
    flag("--variance", choices=VARIANCES, help="of the noise in each step of --solver ancestral")
    number("--guidance-scale", help="classifier-free guidance; 1 for none")
    flag("--guide", metavar="DIR", help="guide by this weaker checkpoint, smaller or earlier (autoguidance)")
    flag("--low-noise", metavar="DIR", help="second model of a pair, used below --boundary")
    number("--boundary", help="time of --low-noise (default: objective.min_time of --checkpoint)")
    number("--low-noise-guidance-scale", help="of --low-noise (default: that of --checkpoint)")
    number("--guidance-rescale", help="keep the contrast of this share of a guided prediction, 0 to 1")
    switch = partial(flag, action=argparse.BooleanOptionalAction)
    switch("--guidance-norm", help="keep the norm of each token of a guided prediction (Qwen-Image)")
    ends = ("LOW", "HIGH")
    number("--guidance-interval", nargs=2, metavar=ends, help="guide only at noise sigma / alpha from LOW to HIGH")
    number(
        "--churn",
        nargs=4,
        metavar=("TOTAL", "LOW", "HIGH", "STD"),
        help="noise before the steps of --solver heun, for EDM, at sigma from LOW to HIGH, such as 40 0.05 50 1.003",
    )
    count("--guidance-channels", help="guide the first N channels of a latent only")
    flag("--thresholding", choices=THRESHOLDINGS, help="of the clean estimate at every step, for models of pixels")
    count(
        "--tile",
        help="draw large samples in tiles of this side, that of training, in positions of a latent (or pixels)",
    )
    flag("--tile-overlap", type=number_in(COUNT_OR_ZERO), metavar="N", help="of neighbours (a quarter of a tile)")
    flag("--seed", type=number_in(SEED), metavar="N", help="addresses the initial noise")
    flag("--fps", type=number_in(POSITIVE), metavar="X", help="frames per second of the clip; a condition of the model")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_parser("launch.sample", DESCRIPTION, EXAMPLES)
    add_sampling_arguments(parser)
    add_request_arguments(parser)
    flag = parser.add_argument
    picture, count = partial(flag, type=Path, metavar="PICTURE"), partial(flag, type=at_least_one, metavar="N")
    flag(
        "--size",
        type=height_and_width,
        metavar="HxW",
        help="pixels of a sample, or positions of a latent that nothing decodes (default: the largest one trained on)",
    )
    count("--frames", help="of each sample, 1 for a still; counted as --size (default: the longest clip's)")
    flag("--vae", metavar="PATH", help="autoencoder, a diffusers folder or hub name (default: that of the data set)")
    start = partial(parser.add_mutually_exclusive_group().add_argument, type=Path, metavar="PICTURE")
    start("--init", help="start from this picture instead of noise alone (image to image)")
    start("--first-frame", help="start clips with this picture (image to video; train with data.clean_first_frame)")
    start(
        "--inpaint",
        nargs=2,
        metavar=("PICTURE", "MASK"),
        help="draw the white region of the mask, and keep the other pixels of the picture (train with data.inpaint)",
    )
    picture(
        "--reference",
        action="append",
        nargs="+",
        default=[],
        help="edit this picture, or compose several; repeat it for each prompt (train with data.references)",
    )
    flag(
        "--reference-aspect",
        choices=ASPECTS,
        help="--aspect of energon_data.prepare, by which references are cropped (default: that of the data, or keep)",
    )
    picture(
        "--control",
        nargs="+",
        default=[],
        help="follow this depth, edges or pose, or one for each prompt (train with model.control_channels)",
    )
    flag("--strength", type=float, metavar="X", help="how far from --init: the share of the steps that are made (0.75)")
    picture("--low-resolution", metavar="FILE", help="pictures that the model or first stage enlarges, as .npy")
    count("--batch", help="samples at a time (default: by their tokens)")
    count("--columns", help="pictures per row")
    file = parser.add_argument_group("files").add_argument
    file("--out", default="samples.png", metavar="FILE", help="the grid: .png, .gif or .mp4 (%(default)s)")
    file("--files", type=Path, metavar="DIR", help="also a file for each sample, and samples.jsonl")
    file("--save-latents", type=Path, metavar="FILE", help="also the latents, as one .safetensors")
    return parser


def open_generator(args: argparse.Namespace, groups: Optional["ProcessGroups"] = None) -> "Generator":
    """Load the model of the checkpoint in the arguments."""
    folders = {"--checkpoint": args.checkpoint, "--guide": args.guide, "--low-noise": args.low_noise}
    for option, folder in folders.items():
        if folder is not None and not Path(folder).is_dir():
            kind = "is a file" if Path(folder).exists() else "does not exist"
            raise CheckpointError(f"{option} {folder} {kind}; give a run folder, or one checkpoint folder in it")
    if args.low_noise is None and (args.boundary is not None or args.low_noise_guidance_scale is not None):
        raise ConfigError("--boundary and --low-noise-guidance-scale belong to a second model; give --low-noise DIR")
    environment.prepare(quiet=True)
    from dit.inference.generator import groups_to_sample, load_generator

    weights: Literal["ema", "raw"] = "raw" if args.raw_weights else "ema"
    groups = groups or groups_to_sample(*filter(None, folders.values()))
    generator = load_generator(args.checkpoint, weights=weights, groups=groups)
    if args.guide is not None:
        generator.guide_by(load_generator(args.guide, weights=weights, groups=groups))
    if args.low_noise is not None:
        low = load_generator(args.low_noise, weights=weights, groups=groups)
        generator.switch_to(low, boundary=args.boundary, guidance_scale=args.low_noise_guidance_scale)
    return generator


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `generate`; None selects the setting of the run."""
    return {"num_steps": args.steps, **{name: getattr(args, name) for name in SETTINGS}}


def note_untrained_guidance(args: argparse.Namespace, generator: "Generator") -> None:
    """Print a note on rank 0 if guidance uses a prediction without conditions that the run never trained.

    Imported weights have no data, and were trained with other settings.
    """
    config, negative = generator.config, getattr(args, "negative_prompt", None)
    scale = config.sampling.guidance_scale if args.guidance_scale is None else args.guidance_scale
    note = config.untrained_guidance(scale, "--guidance-scale ")
    replaced = args.guide is not None or negative is not None
    if note and not replaced and not isinstance(config.data, NoData) and environment.rank() == 0:
        echo(f"note: {note}", file=sys.stderr)


def read_size(args: argparse.Namespace, generator: "Generator", geometry: Optional[Geometry]) -> dict[str, Any]:
    """Return the keyword arguments of `generate` for `--size` and `--frames`, in positions of a latent."""
    if args.size is None and args.frames is None:
        return {}

    frames, height, width = generator.latent_size
    if geometry is not None:
        frames, height, width = geometry.pixel_shape(frames, height, width)
    height, width = (height, width) if args.size is None else args.size
    frames = frames if args.frames is None else args.frames
    latent = check_size(generator.spec, generator.config.model, (frames, height, width), geometry)
    return {"frames": latent[0], "size": latent[1:]}


def run(args: argparse.Namespace) -> None:
    """Draw the samples and write them; for a cascade, those of every stage."""
    pictures = None if args.low_resolution is None else read_pictures(args.low_resolution)
    stages = stages_of(args)
    if not stages:
        draw_and_write(args, pictures)
        return
    if environment.world_size() > 1:
        raise ConfigError("--cascade runs on one rank; start it without torchrun")
    from dit.backends import process_groups

    for stage in stages:
        pictures = draw_and_write(stage.arguments(args), pictures)
        process_groups.release()  # the next model creates new groups


def check_writable(option: str, path: Path, folder: Path) -> None:
    """Check that files can be created in a folder, which may not exist yet, before samples are drawn for it."""
    absolute = folder.absolute()
    existing = next(place for place in (absolute, *absolute.parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ConfigError(f"{option} {path}: nothing can be written to {existing}; choose another path")


def draw_and_write(args: argparse.Namespace, pictures: Optional[Sequence[Tensor]]) -> list[Tensor]:
    """Draw the samples of one checkpoint and write them.

    Args:
        pictures: to be enlarged by a super-resolution model, `[C, 1, h, w]` per sample; None for other models.

    Returns:
        The latent of each sample that this rank has drawn, `[C, T, H, W]`.
    """
    out = Path(args.out)
    check_ending(out, [".png", *CLIP_WRITERS], "--out")
    check_writable("--out", out, out.parent)
    if args.files is not None:
        check_writable("--files", args.files, args.files)
    if args.save_latents is not None:
        check_ending(args.save_latents, [".safetensors"], "--save-latents")
        check_writable("--save-latents", args.save_latents, args.save_latents.parent)
    generator = open_generator(args)
    check_trained(args, generator)
    note_untrained_guidance(args, generator)

    rank, world_size = environment.rank(), environment.world_size()
    channels = generator.config.model.in_channels
    name, note = find_autoencoder(channels, args.vae, generator.autoencoder, "--vae PATH")
    if note and rank == 0:
        echo(note, file=sys.stderr)
    show: Callable[[Tensor], Tensor] = (decode := Decoder(name, local_device()))
    settings = sampling_settings(args) | read_size(args, generator, decode.geometry)
    requested = what_to_draw(args, generator, settings.get("size"), references=args.reference)
    requests, size = with_pictures(generator, requested, pictures, args.augmentation)
    settings |= size
    strength = check_strength(args.strength, initial=args.init is not None)
    latent_size = generator.size_of(settings.get("frames"), settings.get("size"))
    init: dict[str, Any] = {}
    if args.init is not None:
        settings |= {"initial": read_initial(args.init, latent_size, channels, decode), "strength": strength}
        init = {"init": str(args.init), "strength": strength}
    still = 1, *latent_size[1:]
    if args.first_frame is not None:
        settings |= {"first_frame": read_initial(args.first_frame, still, channels, decode, "--first-frame")}
        init = {"first_frame": str(args.first_frame)}
    if args.inpaint is not None:
        inpainting, restore = read_inpainting(args.inpaint, still, channels, generator.spec.patch_spatial, decode)
        settings |= inpainting
        init, show = {"inpaint": [str(path) for path in args.inpaint]}, lambda latents: restore(decode(latents))
    largest, patch = generator.latent_size[1:], generator.spec.patch_spatial
    of_edit = partial(read_reference, largest=largest, channels=channels, patch=patch, decoder=decode)
    of_edit = partial(of_edit, aspect=args.reference_aspect or generator.reference_aspect or "keep")
    of_control = partial(read_initial, latent_size=still, channels=channels, decoder=decode, option="--control")
    for option, paths, read in (
        ("--reference", args.reference, of_edit),
        ("--control", [[path] for path in args.control], of_control),
    ):
        if paths:
            requests = add_pictures(requests, option, paths, args.count, read)
    gallery = Gallery(
        [request.caption for request in requests],
        [request.record | init for request in requests],
        folder=args.files,
        keep_latents=args.save_latents is not None,
        fps=generator.fps if args.fps is None else args.fps,
        clip_ending=default_clip_ending(),
    )
    references = [request.references for request in requests]
    batch_size = args.batch or generator.batch_size(settings.get("frames"), settings.get("size"), references)
    num_batches = len(batches(requests, batch_size)[rank::world_size])
    num_steps = args.steps or generator.config.sampling.num_steps
    latent_by_index: dict[int, Tensor] = {}
    started = time.monotonic()
    with tqdm(desc=counted(len(requests), "sample"), total=num_batches * num_steps, disable=None, leave=False) as bar:
        for indices, latents in draw(
            generator,
            requests,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            on_step=lambda batch, step: bar.update(batch * num_steps + step - bar.n),
            **settings,
        ):
            gallery.add(indices, latents, show(latents))
            latent_by_index |= dict(zip(indices, latents.cpu()))
    local_latents = [latent_by_index[index] for index in sorted(latent_by_index)]
    if not gallery.gather():
        return local_latents
    seconds = time.monotonic() - started
    gallery.save_record()
    if args.save_latents is not None:
        gallery.save_latents(args.save_latents, {} if name is None else {"autoencoder": recorded_name(name)})
    gallery.save_grid(out, args.columns, args.count if args.count > 1 else None)
    note = "" if gallery.shown == len(requests) else f", the first {gallery.shown} shown"
    echo(f"{out}: {counted(len(requests), 'sample')} in {seconds:.1f} s{note}")
    for path in (args.files, args.save_latents):
        if path is not None:
            echo(f"{path}: all {len(requests)}")
    for line in generator.attributions:
        echo(f"trained on {line}")
    return local_latents


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
