"""Support for nemo-run's command: `nemorun dit pretrain --factory tiny_dit --yes training.num_steps=5`.

nemo-run loads this module through the entry point `dit` in pyproject.toml. The import registers the training function,
all recipes, the named parts, and the executors (`executor=torchrun executor.ntasks_per_node=2`).
"""

import importlib

import nemo_run as run

from dit.training import pretrain as training
from launch import executors  # noqa: F401
from recipes import registry

for module in sorted({entry.module for entry in registry.entries()}):
    importlib.import_module(module)

pretrain = run.cli.entrypoint(training.pretrain, namespace="dit")
