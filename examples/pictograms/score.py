"""The metric `pictograms`: rank of the requested drawing by its distance to a sample, among all drawings."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from dit.batch import pixel_values
from dit.errors import ConfigError
from energon_data.media_files import pixels_of
from examples.comparison import draw_samples, folder_to_compare
from examples.pictograms.drawings import NAME, Pictogram, draw
from launch import environment
from launch.measurement import Measurement, Metric
from launch.sample_requests import encode_prompts

if TYPE_CHECKING:
    from dit.encoders.vae import VAE
    from dit.inference.generator import Generator

PROMPTS = 200
BATCH = 50


@dataclass(frozen=True)
class Ranks:
    """Ranks of the requested drawings by distance.

    Attributes:
        first, first_5, first_20: share of the pictures whose requested drawing is the nearest, or among the 5 or 20
            nearest drawings.
        error: root mean square difference to the requested drawing, per pixel value in [-1, 1].
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
        shares = zip(("nearest", "among 5", "among 20"), (self.first, self.first_5, self.first_20))
        return ", ".join(f"{what} {100 * share:.1f} %" for what, share in shares) + f"; RMS error {self.error:.3f}"


@dataclass(frozen=True)
class PictogramScore:
    """Results on generated pictograms.

    Attributes:
        prompts, pictograms: number of requested names, and of drawings that samples are compared with.
        samples: ranks of the generated pictures.
        autoencoder: ranks of true drawings after encoding and decoding, an upper bound in practice; None without an
            autoencoder.
        attribution: the authors of the drawings.
    """

    prompts: int
    pictograms: int
    samples: Ranks
    autoencoder: Optional[Ranks]
    attribution: str

    def missed(self, minimum: Optional[float]) -> list[str]:
        """Return a line if the requested drawing is among the 20 nearest for a smaller share of the samples."""
        share = self.samples.first_20
        if minimum is None or share >= minimum:
            return []
        return [
            f"below the minimum of {100 * minimum:.1f} %: requested drawing among the 20 nearest, {100 * share:.1f} %"
        ]

    def lines(self) -> list[str]:
        lines = [
            f"{self.prompts} pictograms by name, each sample compared with {self.pictograms} drawings",
            f"samples:     the requested drawing is {self.samples.line()}",
        ]
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
    from energon_data.folder import check_dataset

    folder = folder_to_compare(args, generator, (NAME,), "pictograms")
    (description, *_) = (member.description for member in check_dataset(folder, "train"))
    if description.get("name") != NAME:
        raise ConfigError(f"{folder} holds no pictograms; give those that the model was trained on with --data")
    if not description.get("text_encoder"):
        raise ConfigError("pictograms are requested by text: prepare the data with --text-encoder")
    known = [Pictogram(**entry) for entry in description["pictograms"]]
    vae = load_vae(description["vae"]) if description.get("vae") else None
    size = generator.latent_size[-1] if vae is None else description["prepared"]["size"]
    drawings = torch.stack([pixel_values(pixels_of([draw(p.code_point, size)])) for p in known])
    count = min(PROMPTS, len(known))
    requested = [i * len(known) // count for i in range(count)]
    conditions = encode_prompts(generator, [known[i].caption() for i in requested])
    pictures = _decoded(vae, draw_samples(args, generator, conditions))
    if args.out and environment.rank() == 0:
        from dit.sampling.grid import image_grid, save_png

        save_png(image_grid(pictures[:, :, 0], [known[i].name for i in requested]), args.out)
    samples, ceiling = Ranks.of(pictures, drawings, requested), None
    if vae is not None:
        encoded = torch.cat([vae.encode(part) for part in drawings[requested].split(BATCH)])
        ceiling = Ranks.of(_decoded(vae, encoded), drawings, requested)
    score = PictogramScore(count, len(known), samples, ceiling, description["attribution"])
    return Measurement(score.lines(), asdict(score) | {"minimum": args.minimum}, score.missed(args.minimum))


def _decoded(vae: Optional["VAE"], latents: Tensor) -> Tensor:
    """Return pictures on the host; without an autoencoder, latents are pixels."""
    if vae is None:
        return latents.cpu()
    return torch.cat([vae.decode(part) for part in latents.split(BATCH)]).cpu()


PICTOGRAMS = Metric(
    "distance of generated pictograms to the drawings requested by name, ranked among all drawings",
    measure,
    by_condition=True,
)
