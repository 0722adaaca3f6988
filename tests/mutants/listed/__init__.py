"""The mistakes that the suite must see: one changed line each, with the tests that should fail because of it."""

from tests.mutants.listed import commands, data, kernels, layers, objectives, parallel, runs, sampling, shipped, updates

MUTANTS = (
    *objectives.MUTANTS,
    *sampling.MUTANTS,
    *kernels.MUTANTS,
    *layers.MUTANTS,
    *parallel.MUTANTS,
    *updates.MUTANTS,
    *runs.MUTANTS,
    *data.MUTANTS,
    *commands.MUTANTS,
    *shipped.MUTANTS,
)
"""By room of the changed file, a file of this folder for each; mistakes of public projects come last."""
