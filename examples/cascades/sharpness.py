"""The metric `sharpness`: held-out pictures made small and enlarged by a super-resolution model, and bicubically."""

import argparse
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dit.backends.device import local_device
from launch.held_out import add_arguments, redrawn
from launch.measurement import Measurement, Metric

if TYPE_CHECKING:
    from dit.inference.generator import Generator


def squared_error(pictures: Tensor, real: Tensor) -> Tensor:
    """Return the sum of squared differences; values outside of [-1, 1] are clipped, as where they are shown."""
    return (pictures.double().clamp(-1, 1) - real.double().clamp(-1, 1)).square().sum()


def gradient_energy(pictures: Tensor) -> Tensor:
    """Return the sum of squared differences between neighbouring pixels of pictures `[..., H, W]`, clipped alike."""
    clipped = pictures.double().clamp(-1, 1)
    return clipped.diff(dim=-1).square().sum() + clipped.diff(dim=-2).square().sum()


def psnr(mean_square: float) -> float:
    """Return the peak signal-to-noise ratio in dB of values in [-1, 1], whose range has the square 4."""
    return 10 * math.log10(4 / max(mean_square, 1e-12))


def shortfalls(record: dict[str, float], minimum: float) -> list[str]:
    """Return a line for a PSNR below that of bicubic interpolation plus `minimum`, and one for a lack of sharpness."""
    gain = record["psnr"] - record["bicubic_psnr"]
    lines = []
    if gain < minimum:
        lines.append(f"below the minimum of {minimum:.2f} dB: PSNR above bicubic interpolation, {gain:.2f} dB")
    if abs(record["gradient"] - 1) >= abs(record["bicubic_gradient"] - 1):
        lines.append("no sharper than bicubic interpolation: its gradient energy is as far from the real pictures'")
    return lines


def measure(args: argparse.Namespace, generator: "Generator") -> Measurement:
    """Enlarge this run's held-out pictures; every rank calls this."""
    import torch.distributed as dist

    from dit.inference.cascade import low_resolution_of

    bicubic = low_resolution_of(generator.spec)
    sums = torch.zeros(7, dtype=torch.float64)
    for held_out, generated in redrawn(args, generator):
        real = torch.stack(held_out)
        enlarged = [torch.stack(generated), bicubic(real)]
        errors = [squared_error(pictures, real) for pictures in enlarged]
        energies = [gradient_energy(pictures) for pictures in (*enlarged, real)]
        counts = [torch.tensor(float(n)) for n in (real.numel(), len(real))]
        sums += torch.stack([x.double().cpu() for x in (*errors, *energies, *counts)])
    on_device = sums.to(local_device())
    dist.all_reduce(on_device)
    model_error, bicubic_error, model_energy, bicubic_energy, energy, values, count = on_device.tolist()
    # Both in dB, and as shares of the gradient energy of the real pictures, of which 1 is as sharp as they are.
    record = {
        "psnr": psnr(model_error / values),
        "bicubic_psnr": psnr(bicubic_error / values),
        "gradient": model_energy / energy,
        "bicubic_gradient": bicubic_energy / energy,
    }
    lines = [
        f"{count:.0f} held-out pictures, made {bicubic.factor} times smaller and enlarged again",
        f"model:   PSNR {record['psnr']:.2f} dB, gradient energy {100 * record['gradient']:.1f} % of the real ones'",
        f"bicubic: PSNR {record['bicubic_psnr']:.2f} dB, gradient energy {100 * record['bicubic_gradient']:.1f} %",
    ]
    about = {"pictures": int(count), "factor": bicubic.factor, "minimum": args.minimum}
    return Measurement(lines, about | record, [] if args.minimum is None else shortfalls(record, args.minimum))


SHARPNESS = Metric(
    "PSNR and gradient energy of enlarged held-out pictures, compared with bicubic interpolation",
    measure,
    add_arguments,
)
