"""Draw samples from a checkpoint: `python -m launch.sample --checkpoint runs/letters_dit --out samples.png`."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from dit.errors import CheckpointError, ConfigError, UserError, exit_code
from dit.training.settings import SamplingConfig
from launch import environment

SOLVERS = get_args(get_type_hints(SamplingConfig)["solver"])
MAX_DEFAULT_CLASSES = 36
DESCRIPTION = "Draw samples from a checkpoint as one labelled picture."
EXAMPLES = """\
examples
  python -m launch.sample --checkpoint runs/letters_dit                       every class once, samples.png
  python -m launch.sample --checkpoint runs/letters_dit --labels H,E,L,L,O --columns 5 --out hello.png
  python -m launch.sample --checkpoint runs/letters_dit --label 3 --count 16 --guidance-scale 3
"""


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a checkpoint and how to sample from it."""
    group = parser.add_argument_group("sampling", "defaults are those of the run")
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="run folder, or one checkpoint in it")
    parser.add_argument("--raw-weights", action="store_true", help="use the raw weights instead of their average (EMA)")
    group.add_argument("--solver", choices=SOLVERS, help="how the sampling equation is integrated")
    group.add_argument("--steps", type=at_least_one, metavar="N", help="solver steps")
    group.add_argument("--guidance-scale", type=float, metavar="X", help="classifier-free guidance; 1 for none")
    group.add_argument("--seed", type=int, metavar="N", help="addresses the initial noise")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.sample",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_sampling_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--labels", metavar="A,B,C", help="classes by name or number (default: every class)")
    what.add_argument("--label", metavar="N", help="one class by name or number")
    what.add_argument(
        "--text-embedding", nargs="+", metavar="FILE", help="one .npy per text, for a model that takes text"
    )
    parser.add_argument("--count", type=at_least_one, default=1, metavar="N", help="pictures of each (%(default)s)")
    parser.add_argument("--columns", type=at_least_one, metavar="N", help="pictures per row")
    parser.add_argument("--out", default="samples.png", metavar="FILE", help="picture to write (%(default)s)")
    return parser


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def open_generator(args: argparse.Namespace) -> Any:
    """Load what samples from the checkpoint the arguments name.

    Raises:
        CheckpointError: the folder is missing or holds no valid checkpoint.
    """
    folder = Path(args.checkpoint)
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"--checkpoint {folder} {kind}; give a run folder, or one checkpoint folder in it")
    environment.prepare()
    environment.quiet_libraries()
    from dit.training.generator import load_generator

    return load_generator(folder, weights="raw" if args.raw_weights else "ema")


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `generate`; None leaves a setting to the run's own."""
    return {
        "solver": args.solver,
        "num_steps": args.steps,
        "guidance_scale": args.guidance_scale,
        "seed": args.seed,
    }


def read_labels(text: str, class_names: Sequence[str]) -> list[int]:
    """Turn `A,B,3` into class numbers; a name wins over a number, its case counts only where two names differ by it.

    Raises:
        ConfigError: there is no such class.
    """
    exact = {name: i for i, name in enumerate(class_names)}
    folded = {name.casefold(): i for i, name in reversed(list(enumerate(class_names)))}
    labels = []
    for word in (part.strip() for part in text.split(",")):
        label = exact.get(word, folded.get(word.casefold()))
        if label is None and word.isdecimal() and int(word) < len(class_names):
            label = int(word)
        if label is None:
            shown = ", ".join(class_names[:40]) + (", ..." if len(class_names) > 40 else "")
            raise ConfigError(
                f"no class {word!r}; the model knows {len(class_names)} classes, 0 to {len(class_names) - 1}: {shown}"
            )
        labels.append(label)
    return labels


def names_of_classes(generator: Any) -> list[str]:
    """Return the name of each class, its number where it has none.

    Raises:
        ConfigError: the model was trained without classes.
    """
    if generator.class_names:
        return list(generator.class_names)
    count = generator.config["model"].num_classes
    if not count:
        raise ConfigError("the model of this checkpoint takes no class; give --text-embedding or only --count")
    return [str(i) for i in range(count)]


def read_embedding(path: str, context_size: int) -> Tensor:
    """Read the embedding of one text, `[tokens, context_size]`, from a `.npy` file.

    Raises:
        ConfigError: the file is missing, is no array, or does not fit the model.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--text-embedding {path} cannot be read: {error}; save it with numpy.save") from error
    if array.ndim != 2 or array.shape[1] != context_size:
        raise ConfigError(
            f"--text-embedding {path} has shape {list(array.shape)}; the model takes [tokens, {context_size}]"
        )
    return torch.from_numpy(array).float()


def draw(args: argparse.Namespace, generator: Any) -> tuple[Tensor, list[str]]:
    """Generate what the arguments ask for.

    Returns:
        Samples `[N, C, T, H, W]` and a caption for each.
    """
    settings, model = sampling_settings(args), generator.config["model"]
    if args.text_embedding:
        if not model.context_size:
            raise ConfigError("the model of this checkpoint takes no text; choose classes with --labels")
        files = [path for path in args.text_embedding for _ in range(args.count)]
        contexts = [read_embedding(path, model.context_size) for path in files]
        return generator.generate(contexts=contexts, **settings), [Path(path).stem for path in files]
    chosen = args.labels if args.label is None else args.label
    if not model.num_classes and chosen is None:
        return generator.generate(count=args.count, **settings), [f"sample {i}" for i in range(args.count)]
    names = names_of_classes(generator)
    labels = spread(len(names), MAX_DEFAULT_CLASSES) if chosen is None else read_labels(chosen, names)
    labels = [label for label in labels for _ in range(args.count)]
    return generator.generate(labels, **settings), [names[label] for label in labels]


def run(args: argparse.Namespace) -> None:
    """Draw the samples and write the picture."""
    from dit.sampling.grid import image_grid, save_png, to_pictures

    out = Path(args.out)
    if out.suffix.lower() != ".png":
        raise ConfigError(f"--out {out} must end in .png")
    generator = open_generator(args)
    started = time.monotonic()
    samples, captions = draw(args, generator)
    seconds = time.monotonic() - started
    frames = samples.shape[2]
    images = to_pictures(samples).movedim(2, 1).flatten(0, 1)
    columns = args.columns or (frames if frames > 1 else args.count if args.count > 1 else None)
    captions = [caption for caption in captions for _ in range(frames)]
    try:
        save_png(image_grid(images, captions, columns), out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error
    print(f"{out}: {len(samples)} samples in {seconds:.1f} s")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
