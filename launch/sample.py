"""Draw samples from a checkpoint: `python -m launch.sample --checkpoint runs/letters_dit --out samples.png`.

The ending of `--out` chooses what is written: `.png` shows clips frame beside frame, `.gif` and `.mp4` play them.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from dit.errors import CheckpointError, ConfigError, one_line_errors
from dit.sampling.grid import spread
from dit.settings import SamplingConfig
from launch import environment

if TYPE_CHECKING:
    from dit.inference.generator import Generator

SOLVERS, VARIANCES = (get_args(get_type_hints(SamplingConfig)[name]) for name in ("solver", "variance"))
MAX_DEFAULT_CLASSES = 36
DESCRIPTION = "Draw samples from a checkpoint as one labelled picture, or as a film."
EXAMPLES = """\
examples
  python -m launch.sample --checkpoint runs/letters_dit                       every class once, samples.png
  python -m launch.sample --checkpoint runs/letters_dit --labels H,E,L,L,O --columns 5 --out hello.png
  python -m launch.sample --checkpoint runs/letters_dit --label 3 --count 16 --guidance-scale 3
  python -m launch.sample --checkpoint runs/letters_text --prompt "the letter Q in a bold serif font" --out q.png
  python -m launch.sample --checkpoint runs/moving_letters_dit --prompt "the letter Q moving left fast" --out q.gif
"""


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a checkpoint and how to sample from it."""
    group = parser.add_argument_group("sampling", "defaults are those of the run")
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="run folder, or one checkpoint in it")
    parser.add_argument("--raw-weights", action="store_true", help="use the raw weights instead of their average (EMA)")
    group.add_argument("--solver", choices=SOLVERS, help="how the sampling equation is integrated")
    group.add_argument("--steps", type=at_least_one, metavar="N", help="solver steps")
    group.add_argument("--variance", choices=VARIANCES, help="of the noise in each step of --solver ancestral")
    group.add_argument("--guidance-scale", type=float, metavar="X", help="classifier-free guidance; 1 for none")
    group.add_argument(
        "--guidance-channels", type=at_least_one, metavar="N", help="guide the first N channels of a latent only"
    )
    group.add_argument("--seed", type=int, metavar="N", help="addresses the initial noise")
    group.add_argument("--fps", type=frame_rate, metavar="X", help="frames per second, for the model and for the clip")


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
        "--prompt", nargs="+", metavar="TEXT", help="texts, for a model that takes text (default: the run's own)"
    )
    what.add_argument("--text-embedding", nargs="+", metavar="FILE", help="the same as .npy files, already embedded")
    parser.add_argument("--negative-prompt", metavar="TEXT", help="text that guidance leads away from")
    parser.add_argument(
        "--condition",
        action="append",
        nargs="+",
        default=[],
        metavar=("NAME", "VALUE"),
        help="another condition of the model: a number or a .npy file, for all or for each text or class; "
        "`--condition pooled FILE` for FLUX",
    )
    parser.add_argument("--count", type=at_least_one, default=1, metavar="N", help="pictures of each (%(default)s)")
    parser.add_argument(
        "--frames", type=at_least_one, metavar="N", help="of each sample, 1 for a still (default: the longest clip's)"
    )
    parser.add_argument("--columns", type=at_least_one, metavar="N", help="pictures per row")
    parser.add_argument("--out", default="samples.png", metavar="FILE", help=".png, .gif or .mp4 (%(default)s)")
    return parser


def at_least_one(text: str) -> int:
    """Read a command-line argument that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def frame_rate(text: str) -> float:
    """Read a command-line argument that is a number of frames per second."""
    try:
        fps = float(text)
    except ValueError:
        fps = 0.0
    if not 0 < fps < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of frames per second greater than 0, got {text!r}")
    return fps


def open_generator(args: argparse.Namespace) -> "Generator":
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
    from dit.inference.generator import load_generator

    return load_generator(folder, weights="raw" if args.raw_weights else "ema")


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `generate`; None leaves a setting to the run's own."""
    return {
        "solver": args.solver,
        "num_steps": args.steps,
        "variance": args.variance,
        "guidance_scale": args.guidance_scale,
        "guidance_channels": args.guidance_channels,
        "seed": args.seed,
        "fps": args.fps,
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


def names_of_classes(generator: "Generator") -> list[str]:
    """Return the name of each class, its number where it has none.

    Raises:
        ConfigError: the model was trained without classes.
    """
    count = generator.config.model.num_classes
    if not count:
        raise ConfigError("the model of this checkpoint takes no class; give --prompt or only --count")
    if generator.class_names:
        return list(generator.class_names)
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


def read_conditions(asked: Sequence[Sequence[str]], drawn: int) -> dict[str, list[Any]]:
    """Read what `--condition NAME VALUE ...` gives, by name: numbers, or the arrays of `.npy` files.

    Args:
        asked: the words behind each flag.
        drawn: how many different texts, classes or samples are drawn; one value is taken for all of them.

    Raises:
        ConfigError: there are more or fewer values, or one cannot be read.
    """
    found = {}
    for name, *words in asked:
        if len(words) not in (1, drawn):
            raise ConfigError(f"--condition {name} has {len(words)} values for {drawn} samples; give one, or {drawn}")
        values = [_read_value(name, word) for word in words]
        found[name] = values * drawn if len(values) == 1 else values
    return found


def _read_value(name: str, word: str) -> Any:
    try:
        return float(word)
    except ValueError:
        pass
    try:
        return torch.from_numpy(np.load(word, allow_pickle=False)).float()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--condition {name} {word} is no number and cannot be read: {error}; save it with numpy.save"
        ) from error


def encode_prompts(generator: "Generator", prompts: Sequence[str]) -> dict[str, list[Tensor]]:
    """Embed texts as those of the training data were.

    Returns:
        For each condition that their encoders make and the model takes, its value for each text.

    Raises:
        ConfigError: the model takes no text, or its encoder is not known or not installed.
    """
    if not generator.config.model.context_size:
        raise ConfigError("the model of this checkpoint takes no text; choose classes with --labels")
    if generator.text_encoder is None:
        raise ConfigError(
            "the checkpoint does not name the encoder of its texts, for its data set named none; "
            "embed the texts yourself and give --text-embedding"
        )
    from dit.backends.device import local_device
    from dit.encoders.text import load_text_encoders
    from dit.encoders.text_config import as_conditions

    made = load_text_encoders(generator.text_encoder, str(local_device())).encode(prompts)
    return as_conditions(made, generator.spec.conditions)


def telling_words(prompts: Sequence[str]) -> list[str]:
    """Leave out articles and what all prompts share, so that what tells them apart fits above a small picture."""
    shared = set.intersection(*(set(prompt.split()) for prompt in prompts)) | {"a", "an"}
    return [" ".join(word for word in prompt.split() if word not in shared) or prompt for prompt in prompts]


def read_texts(
    args: argparse.Namespace, prompts: Optional[Sequence[str]], generator: "Generator"
) -> tuple[dict[str, list[Tensor]], list[str]]:
    """Return the conditions and the caption of each text, or of each embedding asked for."""
    if prompts:
        return encode_prompts(generator, prompts), telling_words(prompts)
    model = generator.config.model
    if not model.context_size:
        raise ConfigError("the model of this checkpoint takes no text; choose classes with --labels")
    contexts = [read_embedding(path, model.context_size) for path in args.text_embedding]
    return {"context": contexts}, [Path(path).stem for path in args.text_embedding]


def draw(args: argparse.Namespace, generator: "Generator") -> tuple[Tensor, list[str]]:
    """Generate what the arguments ask for.

    Returns:
        Samples `[N, C, T, H, W]` and a caption for each.
    """
    settings, model = sampling_settings(args), generator.config.model
    if args.frames is not None:
        settings["frames"] = args.frames
    chosen = args.labels if args.label is None else args.label
    prompts = args.prompt
    if chosen is None and not (prompts or args.text_embedding) and generator.text_encoder:
        prompts = generator.config.sampling.prompts
    if args.negative_prompt is not None and not (prompts or args.text_embedding):
        raise ConfigError("--negative-prompt leads away from a text, so it needs --prompt or --text-embedding")
    given: dict[str, list[Any]] = {}
    if prompts or args.text_embedding:
        texts, captions = read_texts(args, prompts, generator)
        given |= texts
    elif model.num_classes or chosen is not None:
        names = names_of_classes(generator)
        given["label"] = spread(len(names), MAX_DEFAULT_CLASSES) if chosen is None else read_labels(chosen, names)
        captions = [names[label] for label in given["label"]]
    else:
        captions = [""]
    if args.negative_prompt is not None:
        negative = encode_prompts(generator, [args.negative_prompt])
        settings["negative"] = {name: values * len(captions) * args.count for name, values in negative.items()}
    given |= read_conditions(args.condition, len(captions))
    given = {name: [value for value in values for _ in range(args.count)] for name, values in given.items()}
    captions = [caption for caption in captions for _ in range(args.count)]
    captions = [caption or f"sample {i}" for i, caption in enumerate(captions)]
    return generator.generate(count=len(captions), conditions=given, **settings), captions


def write_samples(
    samples: Tensor, captions: Sequence[str], out: Path, *, fps: float, columns: Optional[int] = None
) -> None:
    """Write samples as a film, or as one picture with the frames of a clip beside each other.

    Raises:
        ConfigError: the file cannot be written, or PyAV is missing for an MP4.
    """
    from dit.sampling.clips import CLIP_WRITERS, clip_grid
    from dit.sampling.grid import image_grid, save_png, to_pictures

    frames = samples.shape[2]
    try:
        if writer := CLIP_WRITERS.get(out.suffix.lower()):
            writer(clip_grid(samples, captions, columns), out, fps)
            return
        images = to_pictures(samples).movedim(2, 1).flatten(0, 1)
        captions = [caption for caption in captions for _ in range(frames)]
        save_png(image_grid(images, captions, columns or (frames if frames > 1 else None)), out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error


def run(args: argparse.Namespace) -> None:
    """Draw the samples and write the picture."""
    from dit.sampling.clips import CLIP_WRITERS

    out = Path(args.out)
    endings = [".png", *CLIP_WRITERS]
    if out.suffix.lower() not in endings:
        raise ConfigError(f"--out {out} must end in {' or '.join(endings)}")
    generator = open_generator(args)
    started = time.monotonic()
    samples, captions = draw(args, generator)
    seconds = time.monotonic() - started
    columns = args.columns or (args.count if args.count > 1 and samples.shape[2] == 1 else None)
    fps = generator.fps if args.fps is None else args.fps
    write_samples(samples, captions, out, fps=fps, columns=columns)
    print(f"{out}: {len(samples)} samples in {seconds:.1f} s")


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
