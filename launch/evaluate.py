"""Judge a letters model: how many generated letters does a reader of real letters read correctly?

`python -m launch.evaluate --checkpoint runs/letters_dit`
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from dit.errors import ConfigError, UserError, exit_code
from launch.letter_reader import LetterReader, load_reader
from launch.sample import add_sampling_arguments, at_least_one, names_of_classes, open_generator, sampling_settings

EXIT_BELOW_MINIMUM = 1
DEFAULT_DATA = "data/letters"
DESCRIPTION = "Let a classifier, trained on real letters only, read generated ones."


@dataclass(frozen=True)
class Score:
    """What the reader made of the samples.

    Attributes:
        correct, total: samples read as the letter they were asked to be, and all samples.
        accuracy: their ratio.
        reader_accuracy: the reader's own on real letters of held-out families.
        misread: "Q as O" and how often, most frequent first.
    """

    correct: int
    total: int
    accuracy: float
    reader_accuracy: float
    misread: dict[str, int]

    def line(self) -> str:
        return (
            f"letters read correctly: {100 * self.accuracy:.1f} % ({self.correct} of {self.total}; "
            f"reader's own accuracy on held-out families {100 * self.reader_accuracy:.1f} %)"
        )


def score(reader: LetterReader, samples: Tensor, labels: Sequence[int]) -> Score:
    """Compare what is read with what was asked for.

    Args:
        samples: `[N, 1, H, W]` in [-1, 1].
        labels: class asked for in each.
    """
    wanted = torch.as_tensor(labels)
    read = reader.read_letters(samples.cpu())
    names = reader.class_names
    wrong = Counter(f"{names[w]} as {names[r]}" for w, r in zip(wanted.tolist(), read.tolist()) if w != r)
    correct = int((read == wanted).sum())
    return Score(correct, len(labels), correct / len(labels), reader.accuracy, dict(wrong.most_common()))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m launch.evaluate", description=DESCRIPTION)
    add_sampling_arguments(parser)
    parser.add_argument("--samples-per-class", type=at_least_one, default=8, metavar="N", help="(%(default)s)")
    parser.add_argument("--data", metavar="DIR", help="letters data set the reader learns from (default: the run's)")
    parser.add_argument("--minimum", type=float, metavar="SHARE", help="exit with 1 if less is read, such as 0.9")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--out", metavar="FILE", help="also write the samples as a PNG, misread ones marked")
    return parser


def data_folder(args: argparse.Namespace, generator: Any) -> str:
    """Return the data set to learn reading from: the flag, else what the run trained on."""
    if args.data:
        return args.data
    return getattr(generator.config["data"], "path", "") or DEFAULT_DATA


def evaluate(args: argparse.Namespace) -> Score:
    """Generate, read and compare.

    Raises:
        ConfigError: the model does not draw the reader's letters.
    """
    if args.minimum is not None and not 0 <= args.minimum <= 1:
        raise ConfigError(f"--minimum {args.minimum} is a share; use a value from 0 to 1, such as 0.9")
    generator = open_generator(args)
    reader = load_reader(data_folder(args, generator))
    names = names_of_classes(generator)
    if len(names) != len(reader.class_names):
        raise ConfigError(
            f"the model draws {len(names)} classes but the reader knows {len(reader.class_names)} letters; "
            "give the data set that the model was trained on with --data"
        )
    labels = [label for label in range(len(names)) for _ in range(args.samples_per_class)]
    samples = generator.generate(labels, **sampling_settings(args))
    if samples.shape[1] != 1 or samples.shape[2] != 1:
        raise ConfigError(
            f"the reader reads still grey pictures; the samples have {samples.shape[1]} channels and "
            f"{samples.shape[2]} frames"
        )
    images = samples[:, :, 0].cpu()
    if args.out:
        _write_grid(images, labels, reader, args)
    return score(reader, images, labels)


def _write_grid(images: Tensor, labels: Sequence[int], reader: LetterReader, args: argparse.Namespace) -> None:
    from dit.sampling.grid import image_grid, save_png

    read, names = reader.read_letters(images).tolist(), reader.class_names
    captions = [names[w] if w == r else f"{names[w]} ({names[r]}?)" for w, r in zip(labels, read)]
    save_png(image_grid(images, captions, columns=args.samples_per_class * 2), args.out)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        result = evaluate(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    if args.json:
        print(json.dumps(asdict(result) | {"minimum": args.minimum}))
    else:
        print(result.line())
        if result.misread:
            print("misread: " + ", ".join(f"{what} ({n})" for what, n in list(result.misread.items())[:10]))
    if args.minimum is not None and result.accuracy < args.minimum:
        print(f"below the minimum of {100 * args.minimum:.1f} %", file=sys.stderr)
        return EXIT_BELOW_MINIMUM
    return 0


if __name__ == "__main__":
    sys.exit(main())
