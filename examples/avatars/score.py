"""The metric `avatars`: share of the attributes that a judge reads as requested, on combinations new to the model."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Optional, get_args

import numpy as np
import torch
from torch import Tensor

from dit.batch import pixel_values
from dit.sampling.grid import to_bytes
from examples.avatars.design import SIZE
from examples.avatars.drawings import ATTRIBUTES, NAME, Avatar, Kind, caption, choose, draw, enlarged
from examples.avatars.judge import read
from examples.comparison import below_minimum, decoded, description_to_compare, draw_samples
from launch import environment
from launch.argument_types import at_least_one
from launch.measurement import Measurement, Metric
from launch.sample_requests import encode_prompts

if TYPE_CHECKING:
    from dit.inference.generator import Generator

SAMPLES = 100
SHOWN, COLUMNS, TILE = 12, 3, 128


@dataclass(frozen=True)
class Score:
    """Results on avatars of one kind.

    Attributes:
        kind: whether training saw the requested combinations.
        samples: number of avatars.
        attributes: share of all attributes that are read as requested.
        avatars: share of the samples with all attributes as requested.
        by_attribute: the first share for each attribute.
        to_requested: distance of a sample to the requested drawing, RMS of 8-bit values, mean of all samples.
        to_trained: the same to the nearest training drawing.
        drawing_to_trained: the same from the requested drawing to the nearest training drawing.
    """

    kind: Kind
    samples: int
    attributes: float
    avatars: float
    by_attribute: dict[str, float]
    to_requested: float
    to_trained: float
    drawing_to_trained: float

    @classmethod
    def of(cls, kind: Kind, pictures: np.ndarray, requested: Sequence[Avatar], trained: Sequence[Avatar]) -> "Score":
        """Judge pictures `[N, H, H, 3]` with 8-bit values; attributes are read from their reduction to 16 x 16."""
        side = pictures.shape[1]
        right_NA = read(reduced(pictures)) == np.array(requested)
        drawings, training = (enlarged(draw(avatars), side) for avatars in (requested, trained))
        return cls(
            kind,
            len(requested),
            right_NA.mean().item(),
            right_NA.all(1).mean().item(),
            dict(zip(ATTRIBUTES, right_NA.mean(0).tolist(), strict=True)),
            distances(pictures, drawings).diagonal().mean().item(),
            distances(pictures, training).min(1).mean().item(),
            distances(drawings, training).min(1).mean().item(),
        )

    def lines(self) -> list[str]:
        """Return the numbers as text."""
        named = ", ".join(f"{name} {100 * share:.0f}" for name, share in self.by_attribute.items())
        return [
            f"{self.kind}: {100 * self.attributes:.1f} % of the attributes as requested ({named}), all nine in "
            f"{100 * self.avatars:.1f} % of {self.samples} avatars",
            f"  distance to the requested drawing {self.to_requested:.1f}, to the nearest training drawing "
            f"{self.to_trained:.1f} (from the requested drawing {self.drawing_to_trained:.1f}); RMS of 8-bit values",
        ]


def reduced(pictures: np.ndarray) -> np.ndarray:
    """Return pictures `[N, 16, 16, 3]`: the mean of each square that shows one pixel of a drawing."""
    count, side = pictures.shape[0], pictures.shape[1] // SIZE
    return pictures.reshape(count, SIZE, side, SIZE, side, 3).mean((2, 4)).round()


def distances(pictures: np.ndarray, drawings: np.ndarray) -> np.ndarray:
    """Return the root mean square difference of 8-bit values between each picture and each drawing, `[N, M]`."""
    a_NC, b_MC = (torch.from_numpy(some.reshape(len(some), -1)).double() for some in (pictures, drawings))
    return (torch.cdist(a_NC, b_MC) / a_NC.shape[1] ** 0.5).numpy()


def measure(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Draw avatars of each kind by text, decode latents, and read the pictures.

    Raises:
        ConfigError: the run was not trained on avatars with texts, or an encoder is missing.
        DataError: the data set cannot be read.
    """
    from dit.encoders.vae import load_vae

    default = "data/avatars_latent" if generator.autoencoder else "data/avatars"
    description = description_to_compare(args, generator, NAME, default)
    trained = choose("trained", description["prepared"]["count"])
    requested = {kind: choose(kind, args.avatars or SAMPLES) for kind in get_args(Kind)}
    conditions = encode_prompts(generator, [caption(avatar) for avatars in requested.values() for avatar in avatars])
    vae = load_vae(description["vae"]) if description.get("vae") else None
    samples = decoded(vae, draw_samples(args, generator, conditions))[:, :, 0].chunk(len(requested))
    if args.out and environment.rank() == 0:
        write_grid(samples[-1], requested["new pair"], args.out)
    scores = [
        Score.of(kind, to_bytes(pictures).numpy(), avatars, trained)
        for pictures, (kind, avatars) in zip(samples, requested.items(), strict=True)
    ]
    lines = [line for score in scores for line in score.lines()]
    record = {"scores": [asdict(score) for score in scores], "minimum": args.minimum}
    return Measurement([*lines, description["attribution"]], record, missed(scores, args.minimum))


def missed(scores: Sequence[Score], minimum: Optional[float]) -> list[str]:
    """Return a line for each kind of new avatars with a smaller share of attributes as requested."""
    return [
        line
        for score in scores
        if score.kind != "trained"
        for line in below_minimum(minimum, f"attributes of a {score.kind}", score.attributes)
    ]


def write_grid(samples: Tensor, requested: Sequence[Avatar], path: str) -> None:
    """Write the first samples, each to the left of its requested drawing, under their captions."""
    from dit.sampling.grid import image_grid, save_png

    side = samples.shape[-1]
    drawings = pixel_values(torch.from_numpy(enlarged(draw(requested), side)).movedim(-1, 1))
    both = torch.cat([samples, drawings], -1)[:SHOWN]
    captions = [caption(avatar) for avatar in requested[:SHOWN]]
    save_png(image_grid(both, captions, columns=COLUMNS, scale=TILE // side), path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of this metric."""
    group = parser.add_argument_group("--metric avatars")
    group.add_argument("--avatars", type=at_least_one, metavar="N", help=f"samples of each kind ({SAMPLES})")


AVATARS = Metric(
    "share of the attributes of generated avatars that are read as requested, for combinations that training never saw",
    measure,
    add_arguments,
    by_condition=True,
)
