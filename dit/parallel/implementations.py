"""Selection of the implementation of every op in a run on this machine."""

from collections.abc import Mapping
from typing import Optional

import torch

from dit.backends.device import ACCELERATOR, local_device
from dit.backends.provider import LINEARS, quantising_linears
from dit.errors import ConfigError
from dit.kernels.choice import Selection, Target, table
from dit.kernels.fp8 import PRODUCTS
from dit.kernels.resolve import OPS as KERNELS
from dit.models.base import ModelConfig
from dit.parallel.verified_kernels import verified_here
from dit.settings import TrainingConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPS = (*KERNELS, LINEARS)
"""All ops with a choice of implementations."""


def target_of(model: ModelConfig, precision: str, device: Optional[torch.device] = None) -> Target:
    """Return the device, dtype and head sizes of a model's ops."""
    return Target(device or local_device(), DTYPES[precision], model.head_sizes, verified_here())


def implementations(model: ModelConfig, training: TrainingConfig) -> dict[str, Selection]:
    """Return the selection for every op in a run of this process, by the name of the op."""
    requested = {f"training.{name}": getattr(training, name) for name in ("attention", "linears", "kernels")}
    target = target_of(model, training.precision)
    if training.cuda_graph and target.device.type != ACCELERATOR.type:
        raise ConfigError(
            f"training.cuda_graph=True needs a GPU, but the device is {target.device}; set training.cuda_graph=False"
        )
    selections = table((*KERNELS, quantising_linears(training.fp8)), target, requested)
    if training.fp8 is not None and selections["linears"].name == "megatron":
        selections |= table((PRODUCTS[training.fp8],), target, {})
    return selections


def fp8_of(training: TrainingConfig, selections: Mapping[str, Selection]) -> str:
    """Describe the quantised products of a run in a few words; empty without."""
    if training.fp8 is None:
        return ""
    name = selections["fp8"].name if "fp8" in selections else selections["linears"].name
    return f" with fp8 {training.fp8} ({'emulated, slower than without' if name == 'emulated' else name})"
