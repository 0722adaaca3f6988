"""The metric `pictograms`: rank of the requested drawing by its distance to a sample, and deviation in flat areas."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor, nn

from dit.batch import pixel_values
from dit.errors import ConfigError
from energon_data.media_files import pixels_of
from examples.comparison import below_minimum, decoded, description_to_compare, draw_samples
from examples.pictograms.drawings import NAME, Pictogram, draw
from launch import environment
from launch.measurement import Measurement, Metric
from launch.picture_scores import feature_network
from launch.sample_requests import encode_prompts

if TYPE_CHECKING:
    from dit.evaluation.features import Features
    from dit.inference.generator import Generator

PROMPTS = 200
BATCH = 50


@dataclass(frozen=True)
class Ranks:
    """Ranks of the requested drawings by distance.

    Attributes:
        first, first_5, first_20: share of the pictures whose requested drawing is the nearest, or among the 5 or 20
            nearest drawings.
        error: root mean square difference to the requested drawing, per pixel value in [-1, 1], or per feature.
    """

    first: float
    first_5: float
    first_20: float
    error: float

    @classmethod
    def of(cls, pictures: Tensor, drawings: Tensor, requested: Sequence[int]) -> "Ranks":
        """Rank all drawings by their distance to each picture.

        Args:
            pictures: `[N, ...]` in [-1, 1].
            drawings: `[M, ...]`, of the same shape each.
            requested: index of the drawing that each picture shall show.
        """
        distance_NM = torch.cdist(pictures.flatten(1).double(), drawings.flatten(1).double())
        own_N1 = distance_NM.gather(1, torch.tensor(requested)[:, None])
        nearer_N = (distance_NM < own_N1).sum(1)
        first, first_5, first_20 = ((nearer_N < count).double().mean().item() for count in (1, 5, 20))
        error = (own_N1.square().mean() / pictures[0].numel()).sqrt().item()
        return cls(first, first_5, first_20, error)

    def line(self) -> str:
        """Return the numbers as text."""
        return f"{self.shares()}; RMS error {self.error:.3f}"

    def shares(self) -> str:
        """Return the shares as text."""
        shares = zip(("nearest", "among 5", "among 20"), (self.first, self.first_5, self.first_20))
        return ", ".join(f"{what} {100 * share:.1f} %" for what, share in shares)


def texture(pictures: Tensor, drawings: Tensor) -> float:
    """Return the root mean square deviation of pixels from their neighbourhood where a drawing is flat.

    A neighbourhood of 3 x 3 pixels counts if the 7 x 7 pixels of the drawing around its centre have one colour, so
    that an edge may be two pixels away from its place. Drawings have 0.

    Args:
        pictures: `[N, 3, H, W]` in [-1, 1].
        drawings: the requested drawing of each picture, of the same shape.

    Returns:
        The deviation in steps of 8-bit values.
    """
    width = 7
    brightest, darkest = (nn.functional.max_pool2d(sign * drawings, width, 1) for sign in (1, -1))
    flat_N1HW = (brightest + darkest).amax(1, keepdim=True) == 0
    inner = pictures[..., 2:-2, 2:-2].double()
    mean = nn.functional.avg_pool2d(inner, 3, 1)
    variance = (nn.functional.avg_pool2d(inner.square(), 3, 1) - mean.square()).clamp(min=0).mean(1, keepdim=True)
    return 127.5 * variance[flat_N1HW].mean().sqrt().item()


@dataclass(frozen=True)
class FeatureScore:
    """Results by the features of a network.

    Attributes:
        ranks: ranks of the generated pictures by the distance of features.
        kid: kernel distance between the generated pictures and the requested drawings.
        network: name of the network.
    """

    ranks: Ranks
    kid: float
    network: str

    @classmethod
    def of(cls, features: "Features", pictures: Tensor, drawings: Tensor, requested: Sequence[int]) -> "FeatureScore":
        """Compare the features of pictures with those of all drawings; arguments as for `Ranks.of`."""
        from dit.evaluation.kernel_distance import kernel_distance

        ours_ND, theirs_MD = (
            torch.cat([features(part).cpu() for part in images.split(BATCH)]) for images in (pictures, drawings)
        )
        ranks = Ranks.of(ours_ND, theirs_MD, requested)
        return cls(ranks, kernel_distance(ours_ND, theirs_MD[list(requested)]), features.network)


@dataclass(frozen=True)
class PictogramScore:
    """Results on generated pictograms.

    Attributes:
        prompts, pictograms: number of requested names, and of drawings that samples are compared with.
        samples: ranks of the generated pictures.
        texture: deviation of the generated pictures where the requested drawings are flat, see `texture`.
        features: results by a feature network; None without `--features`.
        autoencoder: ranks of true drawings after encoding and decoding, an upper bound in practice; None without an
            autoencoder.
        attribution: the authors of the drawings.
    """

    prompts: int
    pictograms: int
    samples: Ranks
    texture: float
    features: Optional[FeatureScore]
    autoencoder: Optional[Ranks]
    attribution: str

    def missed(self, minimum: Optional[float]) -> list[str]:
        """Return a line if the requested drawing is among the 20 nearest for a smaller share of the samples."""
        return below_minimum(minimum, "requested drawing among the 20 nearest", self.samples.first_20)

    def lines(self) -> list[str]:
        lines = [
            f"{self.prompts} pictograms by name, each sample compared with {self.pictograms} drawings",
            f"samples:     the requested drawing is {self.samples.line()}",
            f"flat areas:  deviation of {self.texture:.2f} of 255 between neighbouring pixels, 0 in the drawings",
        ]
        if (by_features := self.features) is not None:
            lines.append(
                f"features:    the requested drawing is {by_features.ranks.shares()}; KID {by_features.kid:.4f} "
                f"({by_features.network})"
            )
        if self.autoencoder is not None:
            lines.append(f"autoencoder: the encoded drawing is {self.autoencoder.line()}")
        return [*lines, self.attribution]


def measure(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Draw pictograms by name, decode the samples, and compare them with all drawings of the same size.

    Raises:
        ConfigError: the run was not trained on pictograms with texts, or an encoder is missing.
        DataError: the data set cannot be read.
    """
    from dit.encoders.vae import load_vae

    description = description_to_compare(args, generator, NAME, "data/pictograms_latent")
    if not description.get("text_encoder"):
        raise ConfigError("pictograms are requested by text: prepare the data with --text-encoder")
    known = [Pictogram(**entry) for entry in description["pictograms"]]
    vae = load_vae(description["vae"]) if description.get("vae") else None
    size = generator.latent_size[-1] if vae is None else description["prepared"]["size"]
    drawings = torch.stack([pixel_values(pixels_of([draw(p.code_point, size)])) for p in known])
    count = min(PROMPTS, len(known))
    requested = [i * len(known) // count for i in range(count)]
    conditions = encode_prompts(generator, [known[i].caption() for i in requested])
    pictures = decoded(vae, draw_samples(args, generator, conditions))
    if args.out and environment.rank() == 0:
        from dit.sampling.grid import image_grid, save_png

        save_png(image_grid(pictures[:, :, 0], [known[i].name for i in requested]), args.out)
    pictures, drawings = pictures[:, :, 0], drawings[:, :, 0]
    by_features = None
    if args.features is not None:
        by_features = FeatureScore.of(feature_network(args, generator), pictures, drawings, requested)
    ceiling = None
    if vae is not None:
        encoded = torch.cat([vae.encode(part) for part in drawings[requested, :, None].split(BATCH)])
        ceiling = Ranks.of(decoded(vae, encoded)[:, :, 0], drawings, requested)
    score = PictogramScore(
        count,
        len(known),
        Ranks.of(pictures, drawings, requested),
        texture(pictures, drawings[requested]),
        by_features,
        ceiling,
        description["attribution"],
    )
    return Measurement(score.lines(), asdict(score) | {"minimum": args.minimum}, score.missed(args.minimum))


PICTOGRAMS = Metric(
    "distance of generated pictograms to the drawings requested by name, ranked among all; flatness of flat areas",
    measure,
    by_condition=True,
)
