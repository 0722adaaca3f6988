"""Losses of tiny recipes to the bit, to show that a change of the code changes no number: two commands.

    python -m benchmarks.loss_curves --out before.json      # on the old revision
    python -m benchmarks.loss_curves --compare before.json  # on the new one, on the same machine

Each recipe trains 20 steps on synthetic data on one rank, and transformers also on TP 2 x PP 2. Two machines (or
versions of torch) round differently, so `tests/integration/loss_curves.json` is compared with a tolerance.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from benchmarks.commands import python_command
from dit.errors import EXIT_OK, EXIT_PREEMPTED, EXIT_UNEXPECTED, DataError
from dit.monitoring.sinks import LOSS, METRICS_FILE, read_records, scalars_by_step
from dit.safe_files import read_json
from dit.terminal import echo

TRANSFORMERS = (
    "tiny_dit_pack",
    "tiny_dit_cross",
    "tiny_stdit_full",
    "tiny_moviegen",
    "tiny_flux",
    "tiny_sana",
    "tiny_hunyuan_video",
    "tiny_wan",
    "tiny_ecdit",
)
CONVOLUTIONS = (
    "tiny_imagen",
    "tiny_imagen_sr",
    "tiny_ddpm_unet",
    "tiny_edm2",
    "tiny_ldm_unet",
    "tiny_sdxl_unet",
    "tiny_autoencoder",
)
RECIPES = TRANSFORMERS + CONVOLUTIONS
STEPS = 20
TP2PP2 = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")
ONE_RANK = "one rank"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    ONE_RANK: (1, ("parallel.data_parallel=ddp",)),
    "TP 2 x PP 2": (4, (*TP2PP2, "parallel.sequence_parallel=True")),
}
Curves = dict[str, dict[str, list[float]]]


def losses(recipe: str, ranks: int, settings: Sequence[str], run_dir: Path, device: str = "cpu") -> list[float]:
    """Train a recipe and return the loss of every step, as `metrics.jsonl` has it; also of a run that stops early.

    Args:
        device: value of `DIT_DEVICE`; empty for a GPU where there is one.

    Raises:
        RuntimeError: the run failed; the message has the end of its output.
    """
    quiet = ("logging.tensorboard=False", "training.validation_interval=0", "training.sample_interval=0")
    words = [f"training.run_dir={run_dir}", f"training.num_steps={STEPS}", "training.log_interval=1", *quiet]
    by_name = {word.partition("=")[0]: word for word in (*words, "checkpoint.interval=0", *settings)}
    command = python_command("launch.train", ranks, ["--yes", "--factory", recipe, *by_name.values()])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DIT_DEVICE": device}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode not in (EXIT_OK, EXIT_PREEMPTED):
        raise RuntimeError(f"{recipe} on {ranks} ranks ended with {process.returncode}:\n{process.stderr[-2000:]}")
    by_step = scalars_by_step(read_records(run_dir / METRICS_FILE))
    return [by_step[step][LOSS] for step in sorted(by_step)]


def curves(recipes: Sequence[str], layouts: Sequence[str]) -> Curves:
    """Return the losses of recipes on layouts: by recipe, then by layout."""
    by_recipe: Curves = {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in recipes:
            by_recipe[recipe] = {}
            for i, name in enumerate(layouts if recipe not in CONVOLUTIONS else [ONE_RANK]):
                ranks, settings = LAYOUTS[name]
                by_recipe[recipe][name] = losses(recipe, ranks, settings, Path(folder) / f"{recipe}_{i}")
                echo(f"{recipe}, {name}: {by_recipe[recipe][name][0]} ... {by_recipe[recipe][name][-1]}", flush=True)
    return by_recipe


def compare(before: Curves, now: Curves) -> list[str]:
    """Return the losses that are not equal to the bit, one line each."""
    differences = []
    for recipe, by_layout in now.items():
        for name, values in by_layout.items():
            earlier = before.get(recipe, {}).get(name)
            if earlier is None:
                differences.append(f"{recipe}, {name}: not in the file")
            elif earlier != values:
                step = next(
                    (i for i, (a, b) in enumerate(zip(earlier, values)) if a != b), min(len(earlier), len(values))
                )
                differences.append(f"{recipe}, {name}: differs from step {step + 1} on")
    return differences


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; with `--compare` the exit code is 0 if every loss is equal to the bit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_curves", description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--out", type=Path, help="write the losses to this JSON file")
    parser.add_argument("--compare", type=Path, help="compare with such a file")
    args = parser.parse_args(argv)
    measured = curves(args.recipes, args.layouts)
    if args.out:
        args.out.write_text(json.dumps(measured, indent=1) + "\n")
    if args.compare is None:
        return EXIT_OK
    differences = compare(read_json(args.compare, DataError, "give a file that --out wrote"), measured)
    echo("\n".join(differences) or f"all {len(measured)} recipes equal {args.compare} to the bit")
    return EXIT_UNEXPECTED if differences else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
