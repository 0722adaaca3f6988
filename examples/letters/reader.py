"""A small classifier that is trained on real letters and evaluates generated ones.

It is trained on the font families of the generator's training data, and its accuracy is measured on held-out families.
A sample that it reads correctly therefore looks like a letter in general, not like one picture of the data.
"""

import hashlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional

from dit.errors import one_line_errors
from dit.safe_files import open_safetensors
from dit.terminal import echo

FILE = "letter_reader.safetensors"
VERSION = "1"  # of the network and its training; increase it to train again
NUM_STEPS = 500
BATCH_SIZE = 128
PEAK_LR = 3e-3
SEED = 0

logger = logging.getLogger(__name__)


class LetterNetwork(nn.Module):
    """Two convolutions and two linears on small grey pictures of any size from 8 x 8.

    Args:
        num_classes: number of letters.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 5, stride=2, padding=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits `[N, num_classes]` of images `[N, 1, H, W]` in [-1, 1]."""
        return self.head(self.features(images))


@dataclass(frozen=True)
class LetterReader:
    """A trained network and its accuracy on held-out font families.

    Attributes:
        network: in evaluation mode.
        accuracy: fraction of held-out letters read correctly.
        num_held_out: number of held-out letters.
        class_names: name of each class.
    """

    network: nn.Module
    accuracy: float
    num_held_out: int
    class_names: tuple[str, ...]

    @torch.no_grad()
    def read_letters(self, images: Tensor) -> Tensor:
        """Return the class read in each image, int64 `[N]`.

        Args:
            images: `[N, 1, H, W]` in [-1, 1], ink 1 and paper -1.
        """
        return torch.cat([self.network(part.float()).argmax(1) for part in images.split(1024)])

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return the features `[N, 128]` in front of the last layer of a `LetterNetwork`; arguments as above."""
        assert isinstance(self.network, LetterNetwork)
        head = self.network.head[:-1]
        return torch.cat([head(self.network.features(part.float())) for part in images.split(1024)])


def vary(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift, scale, rotate, slant, blur, fade pictures and add noise at random, so that only the shape matters.

    Generated letters differ from rendered ones in these properties.
    """
    count, size = len(images), images.shape[-1]

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    turn, slant = uniform(-0.2, 0.2), uniform(-0.25, 0.25)
    scale_x, scale_y = uniform(0.8, 1.25), uniform(0.8, 1.25)
    rows = torch.stack(
        [
            torch.stack([turn.cos() * scale_x, slant - turn.sin() * scale_y, uniform(-0.2, 0.2)], 1),
            torch.stack([turn.sin() * scale_x, turn.cos() * scale_y, uniform(-0.2, 0.2)], 1),
        ],
        1,
    )
    grid = functional.affine_grid(rows, list(images.shape), align_corners=False)
    # Ink in [0, 1], so that pixels from outside of the picture are paper.
    ink = functional.grid_sample((images + 1) / 2, grid, align_corners=False)
    blurred = functional.avg_pool2d(functional.pad(ink, (1, 1, 1, 1)), 3, stride=1)
    thick = functional.max_pool2d(ink, 3, stride=1, padding=1)
    mix, weight = (uniform(low, high)[:, None, None, None] for low, high in ((0.0, 0.6), (-0.3, 0.4)))
    ink = (1 - mix) * ink + mix * blurred + weight.clamp(min=0) * (thick - ink)
    noise = torch.randn(count, 1, size, size, generator=generator) * uniform(0.0, 0.2)[:, None, None, None]
    return (ink * uniform(0.7, 1.1)[:, None, None, None] * 2 - 1 + noise).clamp(-1, 1)


def train_reader(images: Tensor, labels: Tensor, num_classes: int, *, num_steps: int = NUM_STEPS) -> nn.Module:
    """Train a network on real letters; the same data give the same network on one machine."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        network = LetterNetwork(num_classes).train()
        optimizer = torch.optim.AdamW(network.parameters(), lr=PEAK_LR, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=num_steps)
        for _ in range(num_steps):
            rows = torch.randint(len(images), (BATCH_SIZE,), generator=generator)
            logits = network(vary(images[rows], generator))
            loss = functional.cross_entropy(logits, labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def load_reader(folder: str | Path) -> LetterReader:
    """Return the classifier of a data set of letters; train it (under a minute) if it is missing or the data changed.

    The frames of clips are separate pictures. The network is stored as `letter_reader.safetensors` in the folder of the
    data, with the digest of its training data.

    Raises:
        DataError: the data set is missing or damaged.
    """
    from examples.letters.loading import load_letters

    train_images, _, metadata = load_letters(folder, "train")
    held_images, _, held_metadata = load_letters(folder, "val")
    # A class may be a letter with a direction, such as a letter that moves to the left.
    names = tuple(sorted({str(m["letter"]) for m in metadata}))
    train_labels, held_labels = (
        torch.tensor([names.index(m["letter"]) for m in part]) for part in (metadata, held_metadata)
    )
    digest = digest_of(train_images, train_labels, held_images, held_labels)
    path = Path(folder) / FILE
    network = _read_network(path, digest, len(names))
    if network is None:
        logger.info("training the letter reader on %d real letters", len(train_images))
        network = train_reader(train_images, train_labels, len(names))
        _write_network(network, path, digest)
    reader = LetterReader(network, 0.0, len(held_labels), names)
    accuracy = (reader.read_letters(held_images) == held_labels).float().mean().item()
    return LetterReader(network, accuracy, len(held_labels), names)


def digest_of(*tensors: Tensor) -> str:
    """Return the SHA-256 of tensors and of the reader's version."""
    digest = hashlib.sha256(VERSION.encode())
    for tensor in tensors:
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _read_network(path: Path, digest: str, num_classes: int) -> Optional[nn.Module]:
    """Return the stored network, or None if there is none for these data."""
    from safetensors import SafetensorError

    try:
        with open_safetensors(path) as file:
            if (file.metadata() or {}).get("digest") != digest:
                return None
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        logger.warning("%s is damaged and is trained again: %s", path, error)
        return None
    network = LetterNetwork(num_classes)
    network.load_state_dict(state)
    return network.eval()


def _write_network(network: nn.Module, path: Path, digest: str) -> None:
    """Store the network; if the folder is not writable, it is trained again next time."""
    from safetensors.torch import save

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(save(dict(network.state_dict()), metadata={"digest": digest}))
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("the letter reader cannot be stored at %s: %s", path, error)
        temporary.unlink(missing_ok=True)


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Train the reader if needed and print its accuracy."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m examples.letters.reader", description=main.__doc__)
    parser.add_argument("--data", default="data/letters", help="letters data set (%(default)s)")
    args = parser.parse_args(argv)
    logger.setLevel(logging.INFO)
    reader = load_reader(args.data)
    echo(f"letters of held-out families read correctly: {reader.accuracy:.1%} of {reader.num_held_out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
