"""Sampling: one wrong line each."""

from tests.mutants.listed.paths import BOUND, GENERATE, GUIDANCE, SOLVERS, TILES
from tests.mutants.runner import Mutant

MUTANTS = (
    Mutant(
        "guidance: the scale of NeMo",
        "dit/sampling/guidance.py",
        "    return uncond + scale * (cond - uncond)",
        "    return cond + scale * (cond - uncond)",
        (GUIDANCE,),
    ),
    Mutant(
        "guidance: thresholds below 1",
        "dit/sampling/guidance.py",
        ".values.clamp(min=1)",
        ".values.clamp(min=0)",
        (GUIDANCE,),
    ),
    Mutant(
        "ancestral: deviations interpolated for their logarithms",
        "dit/sampling/solvers.py",
        "small ** (1 - fraction) * large**fraction",
        "((1 - fraction) * small + fraction * large)",
        (SOLVERS, BOUND),
    ),
    Mutant(
        "ancestral: the large variance is that of the next level",
        "dit/sampling/solvers.py",
        "return sigma_next * scale, sigma * scale",
        "return sigma_next * scale, sigma_next * scale",
        (SOLVERS,),
    ),
    Mutant(
        "guidance: of the variance, too",
        "dit/sampling/guidance.py",
        "torch.cat([mean, torch.zeros(",
        "torch.cat([mean, torch.ones(",
        (GUIDANCE, GENERATE),
    ),
    Mutant(
        "Heun: no correction",
        "dit/sampling/solvers.py",
        "h / 2 * (slope_TC + slope_next_TC)",
        "h * slope_TC",
        (SOLVERS,),
    ),
    Mutant(
        "DDIM: deviations subtracted for variances",
        "dit/sampling/solvers.py",
        "math.sqrt(sigma_next**2 - fresh**2)",
        "sigma_next - fresh",
        (SOLVERS,),
    ),
    Mutant(
        "DPM-Solver++: half of the extrapolation",
        "dit/sampling/solvers.py",
        "h / (2 * h_previous) *",
        "h / (4 * h_previous) *",
        (SOLVERS,),
    ),
    Mutant(
        "stochastic solvers: the same noise at every step",
        "dit/sampling/generate.py",
        "AddressedNoise(seed, step + 1, batch",
        "AddressedNoise(seed, 1, batch",
        (GENERATE,),
    ),
    Mutant(
        "thresholding: of the solver that follows a learned variance only",
        "dit/sampling/generate.py",
        "return keep_clean(clip(keep_clean(objective.denoise(predict, x_TC, u, layout), batch)), batch)",
        "return keep_clean(objective.denoise(predict, x_TC, u, layout), batch)",
        (GENERATE,),
    ),
    Mutant(
        "tiles: a sum in place of the average",
        "dit/sampling/tiles.py",
        "total_T1[rows_R] += weights_R1",
        "total_T1[rows_R] = weights_R1",
        (TILES,),
    ),
    Mutant(
        "tiles: every tile has the first tile's part of the small picture",
        "dit/sampling/tiles.py",
        "values=entry.values[rows_R])",
        "values=entry.values[: len(rows_R)])",
        (TILES,),
    ),
)
