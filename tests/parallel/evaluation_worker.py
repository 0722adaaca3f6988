"""Run the evaluation command on one rank, with a cascade of small networks with random weights."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dit.backends import process_groups
from dit.backends.process_groups import ProcessGroups
from dit.inference.generator import Generator
from dit.models.unet.config import UNetConfig
from dit.objectives.edm import EDM
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig
from dit.run_config import RunConfig
from dit.settings import SamplingConfig, TrainingConfig
from dit.verify.trial import disturb_constants
from energon_data.mock import MockData
from examples.letters import score as letter_score
from examples.letters.reader import LetterReader
from launch import evaluate

LETTERS, EACH, SIDE = ("A", "B", "C"), 30, 16
SMALL = {
    **{"in_channels": 1, "num_classes": len(LETTERS), "context_size": None, "attention_type": "self"},
    **{"hidden_size": 8, "channel_multipliers": [1, 2], "num_res_blocks": [1, 1], "attention_levels": [1]},
    **{"head_size": 8, "norm_num_groups": 4},
}
MODELS = {"base": UNetConfig(**SMALL), "sr": UNetConfig(**SMALL, low_resolution_factor=2, noise_augmentation=True)}


class Counting(Generator):
    """Counts the samples that this rank draws."""

    drawn = 0

    def generate(self, *args: Any, **given: Any) -> Tensor:
        Counting.drawn += len(given["numbers"])
        return super().generate(*args, **given)


class Inked(nn.Module):
    """Classifies a letter by its sum of pixels, so that a changed pixel may change the class."""

    def forward(self, images: Tensor) -> Tensor:
        ink = images.flatten(1).sum(1)
        return torch.stack([ink.sin(), (2 * ink).sin(), (3 * ink).sin()], 1)


def generator_of(name: str, groups: ProcessGroups) -> Counting:
    model, side = MODELS[name], SIDE * (1 if name == "base" else 2)
    settings = TrainingConfig(precision="fp32")
    (network,) = build_model(model, ParallelConfig(), settings, groups)
    disturb_constants([network], groups)
    sampling = SamplingConfig(num_steps=1, guidance_scale=1.5, solver="euler")
    config = RunConfig(model=model, data=MockData(), objective=EDM(), sampling=sampling, training=settings)
    return Counting(config, {"class_names": list(LETTERS), "latent_size": [1, side, side]}, network.eval(), 0)


def run(case: dict) -> dict:
    """Run `launch.evaluate --cascade`; return its output, its pictures, and how many samples each rank drew."""
    evaluate.open_generator = lambda args, groups: generator_of(args.checkpoint, groups)
    letter_score.load_reader = lambda folder: LetterReader(Inked(), 1.0, 1, LETTERS)
    letter_score.data_folder = lambda args, generator: ""
    Counting.drawn, folder = 0, Path(case["folder"])
    folder.mkdir(exist_ok=True)
    out = io.StringIO()
    words = ["--metric", "letters", "--samples-per-class", str(EACH), "--seed", "3"]
    words += ["--json", "--out", str(folder / "grid.png")]
    with contextlib.redirect_stdout(out):
        code = evaluate.main(["--cascade", "base=base", "sr=sr", *words])
    found = process_groups.gather_objects({"code": code, "out": out.getvalue(), "drawn": Counting.drawn})
    process_groups.release()
    scores = [json.loads(line) for line in found[0]["out"].splitlines()]
    grids = {path.name: path.read_bytes() for path in sorted(folder.glob("*.png"))}
    return {"scores": scores, "silent": [rank["out"] for rank in found[1:]], "grids": grids} | {
        name: [rank[name] for rank in found] for name in ("code", "drawn")
    }
