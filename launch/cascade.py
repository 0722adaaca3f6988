"""A cascade of models, for `--cascade` of a command: each one enlarges the pictures of the one before it."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from dit.condition_table import LOW_RESOLUTION
from dit.errors import ConfigError
from dit.inference.drawing import Request
from launch.argument_types import read_numbers

if TYPE_CHECKING:
    from dit.inference.generator import Generator

SETTINGS: dict[str, Callable[[str], Any]] = {
    "steps": int,
    "guidance_scale": float,
    "guidance_rescale": float,
    "guide": str,
    "solver": str,
    "thresholding": str,
    "augmentation": float,
    "tile": int,
    "tile_overlap": int,
}
"""What may be set for one stage, and how it is read."""


@dataclass(frozen=True)
class Stage:
    """One model of a cascade."""

    name: str
    folder: str
    settings: dict[str, Any] = field(default_factory=dict)

    def arguments(self, args: argparse.Namespace) -> argparse.Namespace:
        """Return the arguments of a command for this stage: its folder, its settings, and files of its own."""
        arguments = argparse.Namespace(**{**vars(args), **self.settings, "checkpoint": self.folder})
        for name in ("out", "save_latents"):
            if (file := getattr(args, name, None)) is not None:
                path = Path(file)
                setattr(arguments, name, path.with_name(f"{path.stem}_{self.name}{path.suffix}"))
        if getattr(args, "files", None) is not None:
            arguments.files = args.files / self.name
        return arguments


def add_cascade_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the stages of a cascade."""
    group = parser.add_argument_group("cascade", "files of a stage have its name in theirs")
    group.add_argument(
        "--stage",
        action="append",
        nargs="+",
        default=[],
        metavar=("NAME", "SETTING=VALUE"),
        help=f"settings of one stage, instead of those of its run or of all stages: {', '.join(SETTINGS)}",
    )
    group.add_argument("--augmentation", type=float, metavar="X", help="noise level of the pictures that are enlarged")


def stages_of(args: argparse.Namespace) -> list[Stage]:
    """Return the stages of `--cascade`, none for `--checkpoint`, after checks of the options for one of them."""
    if args.cascade and args.guide is not None:
        raise ConfigError(f"--guide {args.guide} applies to one model; set it for a stage, --stage NAME guide=DIR")
    if args.cascade and args.low_noise is not None:
        raise ConfigError(f"--low-noise {args.low_noise} applies to one model; use --checkpoint instead of --cascade")
    stages = read_stages(args.cascade or (), args.stage)
    level = stages[0].settings.get("augmentation") if stages else args.augmentation
    if level is not None and getattr(args, "low_resolution", None) is None:
        name = stages[0].name if stages else "the model"
        raise ConfigError(
            f"augmentation {level:g} is the noise of pictures to enlarge, and {name} gets none; set it for a later "
            "stage of --cascade, or leave it out"
        )
    return stages


def read_stages(cascade: Sequence[str], settings: Sequence[Sequence[str]]) -> list[Stage]:
    """Read the stages, first to last."""
    stages: dict[str, Stage] = {}
    for word in cascade:
        name, is_pair, folder = word.partition("=")
        if not (name and is_pair and folder) or name in stages:
            raise ConfigError(f"--cascade {word!r} must be NAME=DIR with a name of its own, such as base=runs/base")
        stages[name] = Stage(name, folder)
    for name, *words in settings:
        if name not in stages:
            raise ConfigError(f"--stage {name}: there is no such stage; --cascade names {', '.join(stages) or 'none'}")
        stages[name] = replace(stages[name], settings=dict(_setting(name, word) for word in words))
    return list(stages.values())


def _setting(stage: str, word: str) -> tuple[str, Any]:
    key, _, value = word.partition("=")
    try:
        return key, SETTINGS[key](value)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"--stage {stage} {word}: must be SETTING=VALUE with one of {', '.join(SETTINGS)}, such as steps=20"
        ) from error


def read_pictures(path: Path) -> list[Tensor]:
    """Read low-resolution pictures `[N, 3, h, w]` with values in [-1, 1] from a `.npy` file, each as `[3, 1, h, w]`."""
    array = read_numbers(path, "--low-resolution")
    if array.ndim != 4:
        raise ConfigError(f"--low-resolution {path} has shape {list(array.shape)}, wanted [N, channels, height, width]")
    if array.dtype.kind != "f":
        raise ConfigError(
            f"--low-resolution {path} holds {array.dtype}, wanted floating-point values in [-1, 1]; convert 0..255 by "
            "x / 127.5 - 1"
        )
    return list(torch.from_numpy(array).float()[:, :, None])


def with_pictures(
    generator: "Generator", requests: list[Request], pictures: Optional[Sequence[Tensor]], level: Optional[float]
) -> tuple[list[Request], dict[str, Any]]:
    """Return the requests with the low-resolution picture of each, and the size of what is drawn from them.

    Args:
        pictures: `[C, 1, h, w]` of each request, from the stage before; None for the first stage.
    """
    from dit.inference.cascade import enlarging

    if pictures is None:
        if generator.spec.condition(LOW_RESOLUTION.name) is not None:
            raise ConfigError(
                "this model enlarges a low-resolution picture; put a model that draws one before it with --cascade, or "
                "give --low-resolution FILE.npy"
            )
        return requests, {}
    if len(pictures) != len(requests):
        raise ConfigError(f"{len(pictures)} low-resolution pictures for {len(requests)} samples; give one for each")
    conditions, size = enlarging(generator.spec, pictures, level)
    changed = [
        replace(request, conditions={**request.conditions, **{name: values[i] for name, values in conditions.items()}})
        for i, request in enumerate(requests)
    ]
    return changed, size
