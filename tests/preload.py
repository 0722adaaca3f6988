"""What ranks of the tests need, imported once, before they are forked; nothing here starts a thread."""

import warnings
from importlib import import_module

warnings.simplefilter("ignore")

for name in (
    "nemo_run",
    "dit.training.pretrain",
    "energon_data.energon_source",
    "energon_data.mock",
    "launch.sample",
    "launch.train",
    "recipes.registry",
    "tests.integration.actions",
    "tests.laws.trial_unet",
    "tests.parallel.context_worker",
    "benchmarks.parallel_checkpoints",
    "tests.parallel.fsdp_worker",
    "tests.parallel.optimizer_worker",
    "tests.parallel.pipeline_cases",
    "benchmarks.parallel_training",
    "dit.verify.trial",
):
    import_module(name)
