"""What ranks of the tests need, imported once, before they are forked; nothing here starts a thread.

The runs of one rank share the counts of operations of their models, a quarter of the time of a run of eight steps.
"""

import gc
import warnings
from importlib import import_module
from typing import Any

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
    "megatron.core.models.backends",
    "numpy.ma",
    "torch.distributed._tools",
    "torch.testing._internal.composite_compliance",
    "torch.utils.serialization",
):
    import_module(name)

from dit.models.base import ModelConfig  # noqa: E402
from dit.models.registry import BACKBONES  # noqa: E402
from dit.monitoring import flops  # noqa: E402
from dit.tracing.forward import ForwardCost  # noqa: E402

for backbone in BACKBONES.values():
    for path in (backbone.config, backbone.model):
        import_module(path.partition(":")[0])

COUNTED: dict[str, tuple[Any, Any]] = {}


class SharedCost(ForwardCost):
    """Counts the operations of each model once per process."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self._cache, self._forms = COUNTED.setdefault(repr(model), (self._cache, self._forms))


flops.ForwardCost = SharedCost  # type: ignore[misc]
gc.freeze()  # otherwise garbage collection in each rank would copy these pages
