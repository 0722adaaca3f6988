"""Import the modules of test ranks once, before ranks are forked; nothing here starts a thread.

Ranks share the FLOP counts of their models, because counting takes a fifth of the time of a run of eight steps. A rank
keeps the initial weights that it has drawn, because the layouts of a world train the same model.
"""

import functools
import gc
import hashlib
import os
import pickle
import warnings
from importlib import import_module
from pathlib import Path

warnings.simplefilter("ignore")

for name in (
    "nemo_run",
    "dit.training.pretrain",
    "energon_data.energon_source",
    "energon_data.mock",
    "launch.config_file",
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
    "diffusers.models.autoencoders.autoencoder_kl",
    "transformers.models.t5.modeling_t5",
    "megatron.core.models.backends",
    "megatron.core.transformer.multi_token_prediction",
    "numpy.ma",
    "torch.distributed._tools",
    "torch.distributed.tensor.debug",
    "torch.nn.attention.varlen",
    "torch.testing._internal.composite_compliance",
    "torch.utils.serialization",
):
    import_module(name)

from dit.backends import init  # noqa: E402
from dit.models.registry import BACKBONES  # noqa: E402
from dit.monitoring import flops  # noqa: E402
from dit.patches import installed_version  # noqa: E402
from dit.tracing.forward import ForwardCost, ForwardFlops  # noqa: E402
from dit.tracing.packs import PackShape  # noqa: E402

for paths in BACKBONES.values():
    for path in paths:
        import_module(f"dit.models.{path.partition(':')[0]}")

for package in ("torch", "megatron-core", "megatron-energon"):
    installed_version(package)
COUNTS = Path(os.environ["COUNTED_OPERATIONS"])


class SharedCost(ForwardCost):
    """FLOP counter that caches the count of each model and pack in a file for all ranks of a session."""

    def traced(self, pack: PackShape) -> ForwardFlops:
        file = COUNTS / hashlib.sha256(repr((self.model, pack)).encode()).hexdigest()
        if file.exists():
            return pickle.loads(file.read_bytes())
        counted = super().traced(pack)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(counted))
        part.replace(file)
        return counted


flops.ForwardCost = SharedCost  # type: ignore[misc]
init.draw = functools.lru_cache(maxsize=4096)(init.draw)
gc.freeze()  # otherwise garbage collection in each rank copies these memory pages
