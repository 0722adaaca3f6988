"""Classes, texts and other conditions of samples, from the command line."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import torch
from PIL.Image import Image
from torch import Tensor

from dit.backends.device import local_device
from dit.condition_table import CONTEXT, SIZE_AND_CROP, size_and_crop
from dit.encoders.text import load_text_encoders, texts_as_conditions
from dit.errors import ConfigError
from dit.inference.drawing import Request, numbered
from dit.sampling.grid import spread
from dit.sampling.prompt_file import LENGTHS, Prompt, read_prompts
from dit.terminal import echo
from launch import environment
from launch.argument_types import at_least_one, height_and_width, read_numbers, top_and_left
from launch.initial_picture import pictures_of_texts

if TYPE_CHECKING:
    from dit.inference.generator import Generator

MAX_DEFAULT_CLASSES = 36


def add_request_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the flags for the conditions of samples; see `what_to_draw`."""
    content = parser.add_mutually_exclusive_group()
    content.add_argument("--labels", metavar="A,B,C", help="classes by name or number (default: every class)")
    content.add_argument("--prompt", nargs="+", metavar="TEXT", help="texts (default: those of the run)")
    content.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a text per line, or a .jsonl of objects with prompt (also negative, seed, original_size, crop, "
        "target_size)",
    )
    parser.add_argument("--negative-prompt", metavar="TEXT", help="text of the unconditional branch of guidance")
    condition = partial(parser.add_argument, "--condition", action="append", nargs="+", metavar=("NAME", "VALUE"))
    described = "a condition: a number or .npy file for all samples or for each; `context FILE` is an embedded text"
    condition(default=[], help=f"{described} (FLUX: also `pooled FILE`)")
    size = partial(parser.add_argument, type=height_and_width, metavar="HxW")
    size("--original-size", help="condition of Stable Diffusion XL: pixels of the original (default: the target size)")
    parser.add_argument("--crop", type=top_and_left, metavar="TOP,LEFT", help="the same: corner of its crop (0,0)")
    size("--target-size", help="the same: size of the crop (default: that drawn)")
    parser.add_argument("--count", type=at_least_one, default=1, metavar="N", help="pictures of each (%(default)s)")


def read_labels(text: str, class_names: Sequence[str]) -> list[int]:
    """Convert `A,B,3` to class numbers; names take precedence over numbers, and case matters only if ambiguous.

    A name may have commas; of several names that fit, the longest is meant.
    """
    exact = {name: i for i, name in enumerate(class_names)}
    folded = {name.casefold(): i for i, name in reversed(list(enumerate(class_names)))}
    most = 1 + max((name.count(",") for name in class_names), default=0)
    labels, parts = [], text.split(",")
    while parts:
        words = [",".join(parts[:n]).strip() for n in range(min(most, len(parts)), 0, -1)]
        word = next((word for word in words if word.casefold() in folded), words[-1])
        del parts[: 1 + word.count(",")]
        label = exact.get(word, folded.get(word.casefold()))
        if label is None and word.isdecimal() and int(word) < len(class_names):
            label = int(word)
        if label is None:
            names = ", ".join(class_names[:40]) + (", ..." if len(class_names) > 40 else "")
            raise ConfigError(
                f"no class {word!r}; the model has {len(class_names)} classes, 0 to {len(class_names) - 1}: {names}"
            )
        labels.append(label)
    return labels


def names_of_classes(generator: "Generator") -> list[str]:
    """Return the name of each class, or its number if it has no name."""
    label = generator.config.model.condition("label")
    if label is None or label.num_classes is None:
        raise ConfigError("the model of this checkpoint takes no class; give --prompt or only --count")
    if generator.class_names:
        return list(generator.class_names)
    return [str(i) for i in range(label.num_classes)]


def read_conditions(flags: Sequence[Sequence[str]], count: int) -> dict[str, list[Any]]:
    """Read the values of `--condition NAME VALUE ...` by name: numbers, or the arrays of `.npy` files.

    Args:
        count: number of different texts, classes or samples; a single value is used for all of them.
    """
    conditions: dict[str, list[Any]] = {}
    for name, *words in flags:
        if name in conditions:
            raise ConfigError(f"--condition {name} is given twice; give all of its values after one --condition {name}")
        if len(words) not in (1, count):
            raise ConfigError(f"--condition {name} has {len(words)} values for {count} samples; give one, or {count}")
        values = [_read_value(name, word) for word in words]
        conditions[name] = values * count if len(values) == 1 else values
    return conditions


def _read_value(name: str, word: str) -> Any:
    try:
        return float(word)
    except ValueError:
        pass
    return torch.from_numpy(read_numbers(word, f"--condition {name} (a number or a .npy file)")).float()


def encode_prompts(
    generator: "Generator",
    prompts: Sequence[str],
    pictures: Optional[Sequence[Sequence[Image]]] = None,
    *,
    negative: bool = False,
) -> dict[str, list[Tensor]]:
    """Embed texts with the encoders of the training data, truncated as in training.

    Args:
        pictures: the pictures to edit of each text, for encoders that read them.
    """
    if generator.config.model.condition("context") is None:
        raise ConfigError("the model of this checkpoint takes no text; choose classes with --labels")
    if generator.text_encoder is None:
        raise ConfigError(
            "the checkpoint has no text encoder, because its data set names none; embed the texts yourself and give "
            "--condition context FILE.npy"
        )

    encoders = load_text_encoders(generator.text_encoder, str(local_device()))
    entries = encoders.encode(prompts, pictures, negative=negative)
    return texts_as_conditions(entries, generator.spec.conditions, generator.longest_text)


def telling_words(prompts: Sequence[str]) -> list[str]:
    """Remove articles and words that all prompts share, so that the rest fits above a small picture."""
    shared = set.intersection(*(set(prompt.split()) for prompt in prompts)) | {"a", "an"}
    return [" ".join(word for word in prompt.split() if word not in shared) or prompt for prompt in prompts]


def what_to_draw(
    args: argparse.Namespace,
    generator: "Generator",
    size: Optional[tuple[int, int]] = None,
    *,
    every_class: bool = False,
    references: Sequence[Sequence[Path]] = (),
) -> list[Request]:
    """Return the requested samples: `--count` of each prompt, embedding or class.

    Args:
        size: height and width of their latents; None for the largest training sample.
        every_class: without a choice, request all classes, not at most `MAX_DEFAULT_CLASSES`.
        references: the pictures to edit of all prompts, or of each.
    """
    prompts = [Prompt(text) for text in args.prompt or ()]
    if args.prompts is not None:
        prompts = read_prompts(args.prompts)
    labels = args.labels
    contexts: list[str] = next((paths for name, *paths in args.condition if name == CONTEXT.name), [])
    if prompts and contexts:
        raise ConfigError("--condition context replaces the texts of --prompt and --prompts; give only one of the two")
    if labels is None and not (prompts or contexts) and generator.text_encoder:
        prompts = [Prompt(text) for text in generator.config.sampling.prompts or ()]
    if args.negative_prompt is not None and not (prompts or contexts):
        raise ConfigError("--negative-prompt needs --prompt or --condition context")
    conditions: dict[str, list[Any]] = {}
    records: list[dict[str, Any]]
    count = len(prompts) or len(contexts)
    pictures = pictures_of_texts(references, generator.text_encoder, count)
    if prompts:
        texts = [prompt.prompt for prompt in prompts]
        conditions |= encode_prompts(generator, texts, pictures)
        captions, records = telling_words(texts), [{"prompt": text} for text in texts]
    elif contexts and labels is None:
        captions, records = [Path(path).stem for path in contexts], [{"context": path} for path in contexts]
    elif generator.config.model.condition("label") or labels is not None:
        names = names_of_classes(generator)
        most = len(names) if every_class else MAX_DEFAULT_CLASSES
        conditions["label"] = spread(len(names), most) if labels is None else read_labels(labels, names)
        captions = [names[label] for label in conditions["label"]]
        records = [{"class": name} for name in captions]
    else:
        captions, records = [""], [{}]
    negatives: list[Optional[str]] = [p.negative for p in prompts] or [None] * len(captions)
    negatives = [args.negative_prompt if negative is None else negative for negative in negatives]
    scale = generator.config.sampling.guidance_scale if args.guidance_scale is None else args.guidance_scale
    if any(text is not None for text in negatives) and not generator.is_guided(scale) and environment.rank() == 0:
        echo("note: without guidance, negative prompts have no effect; set another --guidance-scale", file=sys.stderr)
    negative_conditions = encode_negatives(generator, negatives, pictures)
    conditions |= read_conditions(args.condition, len(captions))
    conditions |= lengths_of(args, prompts or [Prompt("")] * len(captions), generator, size)
    seeds = [prompt.seed for prompt in prompts] or [None] * len(captions)
    default_seed = generator.config.sampling.seed if args.seed is None else args.seed
    requests = []
    for index, (seed, number) in enumerate(numbered(seeds, args.count)):
        i = index // args.count
        record = records[i] | ({} if negatives[i] is None else {"negative": negatives[i]})
        requests.append(
            Request(
                caption=captions[i] or f"sample {index}",
                conditions={name: values[i] for name, values in conditions.items()},
                negative=negative_conditions[i],
                seed=seed,
                number=number,
                record=record | {"seed": default_seed if seed is None else seed, "number": number},
            )
        )
    return requests


def lengths_of(
    args: argparse.Namespace, prompts: Sequence[Prompt], generator: "Generator", size: Optional[tuple[int, int]]
) -> dict[str, list[Tensor]]:
    """Return the six lengths of each prompt if any is given; those of a prompt override those of the command line."""
    requested = [{name: getattr(p, name) or getattr(args, name) for name in LENGTHS} for p in prompts]
    if not any(value is not None for pairs in requested for value in pairs.values()):
        return {}
    if generator.spec.condition(SIZE_AND_CROP.name) is None:
        raise ConfigError(
            "original size, crop and target size are conditions of Stable Diffusion XL, but this model takes none of "
            "them; leave them out"
        )
    sample_size = size_and_crop(*generator.size_of(None, size)[1:])[4:].tolist()
    values = []
    for pairs in requested:
        target = pairs["target_size"] or sample_size
        lengths = [*(pairs["original_size"] or target), *(pairs["crop"] or (0, 0)), *target]
        values.append(torch.tensor(lengths, dtype=torch.float32))
    return {SIZE_AND_CROP.name: values}


def encode_negatives(
    generator: "Generator", texts: Sequence[Optional[str]], pictures: Optional[Sequence[Sequence[Image]]]
) -> list[dict[str, Tensor]]:
    """Embed each different text once; no condition for None.

    Args:
        pictures: the pictures to edit of each text, for encoders that read them, also with the empty text for None.
    """
    if pictures is not None:
        encoded = encode_prompts(generator, [text or "" for text in texts], pictures, negative=True)
        return [{name: values[i] for name, values in encoded.items()} for i in range(len(texts))]
    different = sorted({text for text in texts if text is not None})
    encoded = encode_prompts(generator, different, negative=True) if different else {}
    return [
        {} if text is None else {name: values[different.index(text)] for name, values in encoded.items()}
        for text in texts
    ]
