"""The metric `letters`: the share of generated letters that a classifier of real letters reads correctly.

For a model of texts, every letter is generated in the styles of the training data, and the effect of style words is
measured. For a model of moving letters, every frame is read, and the motion is measured.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dit.condition_table import LABEL
from dit.errors import ConfigError
from examples.comparison import below_minimum, check_minimums, draw_samples, folder_to_compare
from examples.letters.checks import Check, Contrast, contrasts, judge_contrast, judge_motion
from examples.letters.reader import LetterReader, load_reader
from launch import environment
from launch.argument_types import at_least_one
from launch.measurement import Measurement, Metric
from launch.sample_requests import encode_prompts, names_of_classes

if TYPE_CHECKING:
    from dit.evaluation.features import Features
    from dit.inference.generator import Generator

DEFAULT_DATA = "data/letters"
DATA_SETS = ("letters", "moving_letters")
"""Names of data sets that can train the classifier."""
SAMPLES_PER_CLASS, CLIPS_PER_CLASS, PAIRS_PER_LETTER = 8, 2, 4
LIKE_LETTERS = str.maketrans("01l|", "OIII")
"""Characters that a reader of texts takes for these letters when they have no neighbours."""

Samples = tuple[Tensor, list[int], list[Check]]
"""Samples `[N, 1, T, H, W]` in [-1, 1], the index of the requested letter of each, and other measurements."""


@dataclass(frozen=True)
class Score:
    """Results of the classifier on the samples.

    Attributes:
        correct, total: pictures read as the requested letter, and all pictures; frames count individually.
        accuracy: their ratio.
        reader_accuracy: of the classifier on real letters of held-out families.
        misread: counts of errors such as "Q as O", most frequent first.
        by_frame: accuracy in each frame of the clips; one number for pictures.
        checks: the other measurements.
    """

    correct: int
    total: int
    accuracy: float
    reader_accuracy: float
    misread: dict[str, int]
    by_frame: tuple[float, ...]
    checks: tuple[Check, ...] = ()

    def lines(self) -> list[str]:
        what = "letters" if len(self.by_frame) == 1 else "letters in single frames"
        lines = [
            f"{what} read correctly: {100 * self.accuracy:.1f} % ({self.correct} of {self.total}; "
            f"reader's own accuracy on held-out families {100 * self.reader_accuracy:.1f} %)"
        ]
        if len(self.by_frame) > 1:
            lines.append("frame by frame: " + " ".join(f"{100 * share:.1f}" for share in self.by_frame) + " %")
        if self.misread:
            lines.append("misread: " + ", ".join(f"{what} ({n})" for what, n in list(self.misread.items())[:10]))
        return lines + [check.line() for check in self.checks]


def score(reader: LetterReader, samples: Tensor, letters: Sequence[int], checks: Sequence[Check] = ()) -> Score:
    """Compare the letters that are read with the requested ones.

    Args:
        samples: `[N, 1, T, H, W]` in [-1, 1].
        letters: index of the requested letter of each.
    """
    frames = samples.shape[2]
    requested = torch.as_tensor(letters).repeat_interleave(frames)
    read = reader.read_letters(samples.movedim(2, 1).flatten(0, 1))
    names = reader.class_names
    wrong = Counter(f"{names[w]} as {names[r]}" for w, r in zip(requested.tolist(), read.tolist()) if w != r)
    right = read == requested
    by_frame = tuple(right.view(-1, frames).float().mean(0).tolist())
    correct, total = int(right.sum()), len(requested)
    misread = dict(wrong.most_common())
    return Score(correct, total, correct / total, reader.accuracy, misread, by_frame, tuple(checks))


def judge_by_ocr(samples: Tensor, letters: Sequence[str], folder: str) -> Check:
    """Read the letters by a reader of texts that was trained elsewhere, and real letters of held-out families."""
    from dit.evaluation.text_reader import TextReader
    from examples.letters.loading import load_letters

    reader = TextReader("--ocr")

    def passes(images: Tensor, requested: Sequence[str]) -> Tensor:
        read = reader.lines(-images.expand(-1, 3, -1, -1))
        return torch.tensor(
            [text.translate(LIKE_LETTERS).upper() == x for text, x in zip(read, requested, strict=True)]
        )

    images = samples.movedim(2, 1)
    drawn = passes(images.flatten(0, 1), [letter for letter in letters for _ in range(images.shape[1])])
    real, _, metadata = load_letters(folder, "val")
    of_real = passes(real, [str(meta["letter"]) for meta in metadata]).float().mean()
    detail = f"real letters of held-out families {100 * of_real:.1f} %"
    return Check.of("ocr", "letters read correctly by RapidOCR", drawn, detail)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this metric."""
    group = parser.add_argument_group("--metric letters")
    group.add_argument("--ocr", action="store_true", help="also read the letters by RapidOCR, trained on other data")
    group.add_argument(
        "--samples-per-class",
        type=at_least_one,
        metavar="N",
        help=f"({SAMPLES_PER_CLASS}; of clips {CLIPS_PER_CLASS})",
    )
    group.add_argument(
        "--minimum-style", type=float, metavar="SHARE", help="exit with 1 if the share of any style word is lower"
    )
    group.add_argument(
        "--minimum-motion",
        type=float,
        metavar="SHARE",
        help="exit with 1 if the share of any measure of motion is lower",
    )


def data_folder(args: argparse.Namespace, generator: "Generator") -> str:
    """Return the data set of the classifier; arguments and errors as of `folder_to_compare`."""
    return folder_to_compare(args, generator, DATA_SETS, "letters", DEFAULT_DATA)


def reader_features(args: argparse.Namespace, generator: "Generator") -> "Features":
    """Return the network of `--features letters`: the classifier of the run's letters without its last layer.

    Raises:
        ConfigError: the model does not generate grey pictures.
    """
    from dit.evaluation.features import Features, bytes_of, named

    if (channels := generator.config.model.in_channels) != 1:
        raise ConfigError(
            f"--features letters are features of grey letters, and the model has {channels} channels; give weights of "
            "Inception v3, a TorchScript file or a folder with a CLIP model as --features PATH"
        )
    reader = load_reader(data_folder(args, generator))
    name = named("reader of letters", bytes_of(reader.network.state_dict()))
    return Features(lambda images: reader.features(images[:, :1].cpu()), name)


def measure(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Generate, read and compare.

    Raises:
        ConfigError: the model does not generate the letters of the classifier.
    """
    check_minimums(args)
    folder = data_folder(args, generator)
    reader = load_reader(folder)
    judge = _judge_classes if generator.config.model.condition("label") else _judge_texts
    samples, letters, checks = judge(args, generator, reader, folder)
    if args.ocr:
        checks = [*checks, judge_by_ocr(samples, [reader.class_names[letter] for letter in letters], folder)]
    result = score(reader, samples, letters, checks)
    return Measurement(result.lines(), asdict(result) | {"minimum": args.minimum}, shortfalls(result, args))


def _judge_classes(args: argparse.Namespace, generator: "Generator", reader: LetterReader, folder: str) -> Samples:
    """Generate every class; the first word of its name is the letter, a second one its direction."""
    names = [name.split() for name in names_of_classes(generator)]
    if {words[0] for words in names} != set(reader.class_names):
        raise ConfigError(
            f"the model has {len(names)} classes but the reader {len(reader.class_names)} letters; "
            "give the data set that the model was trained on with --data"
        )
    moving = all(len(words) > 1 for words in names)
    each = args.samples_per_class or (CLIPS_PER_CLASS if moving else SAMPLES_PER_CLASS)
    labels = [label for label in range(len(names)) for _ in range(each)]
    samples = _checked(draw_samples(args, generator, {LABEL.name: labels}), moving)
    checks = _judge_clips(samples, [names[label][1] for label in labels], folder) if moving else []
    letters = [reader.class_names.index(names[label][0]) for label in labels]
    _write_grid(samples, letters, reader, args, each)
    return samples, letters, checks


def _judge_clips(samples: Tensor, directions: list[str], folder: str) -> list[Check]:
    """Compare the motion with that of the held-out clips."""
    from examples.letters.loading import load_clips

    clips = [(clip, meta["direction"]) for clip, meta in load_clips(folder, "val") if clip.shape[1] > 1]
    return judge_motion(samples, directions, torch.stack([clip for clip, _ in clips]), [d for _, d in clips])


def _judge_texts(args: argparse.Namespace, generator: "Generator", reader: LetterReader, folder: str) -> Samples:
    """Generate every letter by text, and measure the other words of the captions."""
    from energon_data.folder import check_folder

    description = check_folder(Path(folder), "train").description
    if not description.get("text_encoder"):
        raise ConfigError(f"the model takes text, but {folder} has none; give the data it was trained on with --data")
    judge = _judge_moving_texts if description.get("name") == "moving_letters" else _judge_styled_texts
    return judge(args, generator, reader, folder, description["splits"]["train"]["faces"])


def _draw(args: argparse.Namespace, generator: "Generator", prompts: Sequence[str], *, moving: bool = False) -> Tensor:
    conditions = encode_prompts(generator, prompts)
    return _checked(draw_samples(args, generator, conditions), moving)


def _judge_moving_texts(
    args: argparse.Namespace, generator: "Generator", reader: LetterReader, folder: str, faces: list[dict[str, Any]]
) -> Samples:
    """Generate every letter in every direction, at each speed in turn."""
    from examples.letters.moving import DIRECTIONS, SPEEDS, caption

    each, speeds, names = args.samples_per_class or CLIPS_PER_CLASS, list(SPEEDS), reader.class_names
    requested = [(x, d, speeds[i % len(speeds)]) for x in range(len(names)) for d in DIRECTIONS for i in range(each)]
    samples = _draw(args, generator, [caption(names[x], *rest) for x, *rest in requested], moving=True)
    letters = [letter for letter, _, _ in requested]
    _write_grid(samples, letters, reader, args, each)
    return samples, letters, _judge_clips(samples, [direction for _, direction, _ in requested], folder)


def _judge_styled_texts(
    args: argparse.Namespace, generator: "Generator", reader: LetterReader, folder: str, faces: list[dict[str, Any]]
) -> Samples:
    """Generate every letter in each style of the training fonts in turn, and in pairs of styles."""
    from examples.letters.captions import Style
    from examples.letters.loading import load_letters

    styles = sorted({Style.from_record(face) for face in faces}, key=lambda style: style.all_words)
    each, names = args.samples_per_class or SAMPLES_PER_CLASS, reader.class_names
    letters = [letter for letter in range(len(names)) for _ in range(each)]
    prompts = [styles[i % len(styles)].caption(names[letter]) for i, letter in enumerate(letters)]
    samples = _draw(args, generator, prompts)
    _write_grid(samples, letters, reader, args, each)
    real, _, metadata = load_letters(folder, "train")

    def real_in(style: Style) -> Tensor:
        files = {face["file"] for face in faces if Style.from_record(face) == style}
        return real[[meta["font"] in files for meta in metadata]]

    def judge(contrast: Contrast) -> Check:
        # Sample i has the same noise in both, so only the word differs.
        both = (contrast.more, contrast.less)
        more, less = (
            _draw(args, generator, [style.caption(name) for name in names] * PAIRS_PER_LETTER) for style in both
        )
        return judge_contrast(contrast, more[:, :, 0], less[:, :, 0], (real_in(contrast.more), real_in(contrast.less)))

    return samples, letters, [judge(contrast) for contrast in contrasts(faces)]


def _checked(samples: Tensor, moving: bool = False) -> Tensor:
    """Return samples in the format of the classifier, on CPU."""
    if samples.shape[1] != 1 or (samples.shape[2] != 1) != moving:
        raise ConfigError(
            f"the reader reads {'grey clips' if moving else 'still grey pictures'}; the samples have "
            f"{samples.shape[1]} channels and {samples.shape[2]} frames"
        )
    return samples.cpu()


def _write_grid(
    samples: Tensor, letters: Sequence[int], reader: LetterReader, args: argparse.Namespace, each: int
) -> None:
    if not args.out or environment.rank() > 0:
        return
    from dit.sampling.grid import image_grid, save_png

    images, frames, names = samples.movedim(2, 1).flatten(0, 1), samples.shape[2], reader.class_names
    requested = [letter for letter in letters for _ in range(frames)]
    read = reader.read_letters(images).tolist()
    captions = [names[w] if w == r else f"{names[w]} ({names[r]}?)" for w, r in zip(requested, read)]
    save_png(image_grid(images, captions, columns=2 * (frames if frames > 1 else each)), args.out)


def shortfalls(result: Score, args: argparse.Namespace) -> list[str]:
    """Return the measurements below their minimum, one line each."""
    minimums = {kind: getattr(args, f"minimum_{kind}") for kind in ("style", "motion", "family")}
    lines = below_minimum(args.minimum, "letters read correctly", result.accuracy)
    for check in result.checks:
        lines += below_minimum(minimums.get(check.kind), check.name, check.share)
    kinds = {check.kind for check in result.checks}
    lines += [f"no {kind} was measured" for kind in minimums if minimums[kind] is not None and kind not in kinds]
    return lines


LETTERS = Metric(
    "share of generated letters that a classifier of real letters reads correctly",
    measure,
    add_arguments,
    by_condition=True,
)
