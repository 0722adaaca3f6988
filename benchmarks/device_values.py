"""Compare this device with recorded losses of a CPU: `python -m benchmarks.device_values`.

Tiny recipes of transformers, UNets and an autoencoder train 20 steps in fp32 on one rank; then some with FSDP, in bf16,
with fused kernels, and stopped and resumed. A check is the largest relative difference of their losses from
`tests/integration/loss_curves.json`, and has a bound. The last check draws samples of one checkpoint on this device and
on the CPU.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Optional

from benchmarks.clock import append
from benchmarks.loss_curves import CONVOLUTIONS, ONE_RANK, STEPS, TRANSFORMERS, losses
from dit.convert.state_files import read_tensors
from dit.errors import EXIT_OK, EXIT_UNEXPECTED, DataError
from dit.safe_files import read_json
from dit.terminal import echo
from launch.argument_types import at_least_one

CURVES = Path(__file__).parents[1] / "tests" / "integration" / "loss_curves.json"
FP32 = 1e-3
"""Bound of fp32: rounding that 20 steps of Adam amplify; that of `tests/integration/test_recipes_train.py`."""
TF32 = 1e-2
"""Bound of convolutions, whose products on a GPU have the 10 bits of TF32 by default."""
BF16 = 3e-2
"""Bound of bf16, which has 8 bits."""
SAMPLES = 1e-2
"""Bound of latents after all solver steps in fp32, in Euclidean norm."""
FSDP = ("parallel.data_parallel=fsdp",)
HALF = ("training.precision=bf16",)
FUSED = ("training.kernels=triton",)
STOP = ("checkpoint.interval=10", f"training.stop_at_step={STEPS // 2}")
RESUMED = "tiny_ddpm_unet"
"""A recipe of classes, so that samples need no text encoder."""
ON_GPU, ON_CPU = "", "cpu"
"""Values of `DIT_DEVICE`."""


@dataclass(frozen=True)
class Check:
    """A run whose losses have a recorded curve.

    Attributes:
        name: of the check.
        recipe, settings: of the run.
        bound: largest relative difference of a loss that passes.
    """

    name: str
    recipe: str
    settings: tuple[str, ...]
    bound: float


def checks() -> Iterator[Check]:
    """Yield all checks of losses."""
    for recipe in TRANSFORMERS:
        yield Check(recipe, recipe, (), FP32)
    for recipe in CONVOLUTIONS:
        yield Check(recipe, recipe, (), TF32)
    yield Check("tiny_moviegen, FSDP", "tiny_moviegen", FSDP, FP32)
    yield Check("tiny_imagen, FSDP", "tiny_imagen", FSDP, TF32)
    for recipe in ("tiny_dit_cross", "tiny_flux", "tiny_wan", "tiny_ldm_unet"):
        yield Check(f"{recipe}, bf16", recipe, HALF, BF16)
        yield Check(f"{recipe}, bf16, fused kernels", recipe, HALF + FUSED, BF16)


OF_A_CHECKPOINT = (f"{RESUMED}, resumed", f"{RESUMED}, samples")
"""Names of the checks of a resumed run and of its samples."""


def names() -> list[str]:
    """Return the names of all checks."""
    return [*(check.name for check in checks()), *OF_A_CHECKPOINT]


def difference(measured: Sequence[float], recorded: Sequence[float]) -> float:
    """Return the largest relative difference of two curves.

    Raises:
        ValueError: they have different lengths.
    """
    return max(abs(a - b) / abs(b) for a, b in zip(measured, recorded, strict=True))


def curve(check: Check, recorded: Sequence[float], folder: Path) -> float:
    """Run a check and return the difference."""
    name = check.name.replace(", ", "_").replace(" ", "_")
    return difference(losses(check.recipe, 1, check.settings, folder / name, ON_GPU), recorded)


def resumed(recorded: Sequence[float], folder: Path) -> float:
    """Stop a run in the middle, resume it from its checkpoint, and return the difference of all its losses."""
    losses(RESUMED, 1, STOP, folder / "resumed", ON_GPU)
    return difference(losses(RESUMED, 1, STOP[:1], folder / "resumed", ON_GPU), recorded)


def samples(folder: Path) -> float:
    """Draw samples of the resumed run on this device and on the CPU, and return their relative difference."""
    drawn = []
    for device in (ON_GPU, ON_CPU):
        latents = folder / f"latents_{device or 'gpu'}.safetensors"
        files = ["--out", str(folder / f"samples_{device}.png"), "--save-latents", str(latents)]
        command = [sys.executable, "-m", "launch.sample", "--checkpoint", str(folder / "resumed"), *files]
        ended = subprocess.run(command, env={**os.environ, "DIT_DEVICE": device}, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"launch.sample ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
        drawn.append(read_tensors(latents))
    ours, theirs = drawn
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; the exit code is 0 if every check passes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_values", description=__doc__)
    parser.add_argument("--jobs", type=at_least_one, default=6, help="runs at the same time (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="checks whose name contains one of these")
    parser.add_argument("--out", type=Path, help="append one JSON line per check to this file")
    args = parser.parse_args(argv)
    recorded = {r: c[ONE_RANK] for r, c in read_json(CURVES, DataError, "restore it from git").items()}
    failed = 0

    def report(name: str, run: Callable[[], float], bound: float) -> None:
        nonlocal failed
        try:
            value, error = run(), None
        except (RuntimeError, ValueError, KeyError) as reason:
            value, error = None, str(reason)[-500:]
        passed = value is not None and value <= bound
        failed += not passed
        append(args.out, {"check": name, "difference": value, "bound": bound, "passed": passed, "error": error})
        shown = "failed" if value is None else f"{value:.1e}"
        echo(f"{name:<44}{shown:>10}{bound:>10.0e}  {'' if passed else error or 'not equal'}", flush=True)

    def wanted(name: str) -> bool:
        return not args.only or any(text in name for text in args.only)

    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folder = Path(temporary)
        jobs = [
            pool.submit(report, check.name, partial(curve, check, recorded[check.recipe], folder), check.bound)
            for check in checks()
            if wanted(check.name)
        ]
        if wanted("resume and samples"):
            of_run, of_samples = OF_A_CHECKPOINT
            report(of_run, partial(resumed, recorded[RESUMED], folder), TF32)
            report(of_samples, partial(samples, folder), SAMPLES)
        for job in as_completed(jobs):
            job.result()
    return EXIT_UNEXPECTED if failed else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
