"""Which implementation of every op a run uses on this machine, and why not the others."""

from typing import Optional

import torch

from dit.backends.device import local_device
from dit.backends.provider import LINEARS
from dit.kernels.choice import Selection, Target, table
from dit.kernels.resolve import OPS as KERNELS
from dit.models.base import ModelConfig
from dit.settings import TrainingConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPS = (*KERNELS, LINEARS)
"""All ops of which a run selects an implementation."""


def target_of(model: ModelConfig, precision: str, device: Optional[torch.device] = None) -> Target:
    """Return what a model's ops run on.

    Args:
        device: None for that of this process.
    """
    sizes = model.megatron_sizes()
    return Target(device or local_device(), DTYPES[precision], sizes.hidden_size // sizes.num_attention_heads)


def implementations(model: ModelConfig, training: TrainingConfig) -> dict[str, Selection]:
    """Return the implementation of every op in a run of this process, by the name of the op.

    Raises:
        ConfigError: a setting names one that is unknown or cannot run here.
    """
    asked = {f"training.{name}": getattr(training, name) for name in ("attention", "linears", "kernels")}
    return table(OPS, target_of(model, training.precision), asked)
