"""Which implementation of each op runs: resolved once per process, logged, and stored with the run.

Each op has one file in this package. It has an eager implementation, the reference on every device, and may have faster
ones. They are selected here.
"""

from importlib.util import find_spec
from typing import Literal, get_args

import torch

from dit.errors import ConfigError
from dit.kernels.attention import Attention, flash_attention, segment_sdpa, varlen_attention
from dit.kernels.attention_blocks import BlockAttention, EagerBlocks, FlashBlocks

AttentionChoice = Literal["auto", "sdpa", "varlen", "flash_attn", "transformer_engine"]
_PACKAGES: dict[AttentionChoice, str] = {"transformer_engine": "transformer_engine", "flash_attn": "flash_attn"}
EAGER_OPS = ("layer_norm_modulate", "rms_norm_modulate", "gated_residual", "rotate", "gelu_tanh", "swiglu")
"""Ops of `modulation` and `rope` that have only an eager implementation."""


def table(device: torch.device, dtype: torch.dtype, attention: AttentionChoice = "auto") -> dict[str, str]:
    """Return the implementation of every op on a device, by the name of the op.

    Args:
        attention: `training.attention`.

    Raises:
        ConfigError: as `resolve_attention`.
    """
    return {
        "attention": resolve_attention(device, dtype, attention)[0],
        "attention_blocks": type(resolve_blocks(device, dtype)).__name__,
        **dict.fromkeys(EAGER_OPS, "eager"),
    }


def resolve_attention(
    device: torch.device, dtype: torch.dtype, choice: AttentionChoice = "auto"
) -> tuple[str, Attention]:
    """Select the attention path of this process; its name is logged and stored in the run record.

    Args:
        device: on which the attention runs.
        dtype: of queries, keys and values.
        choice: `auto` selects, for half precision on CUDA, the first importable of Transformer Engine, flash-attn and
            torch's varlen kernel, and scaled-dot-product attention elsewhere.

    Returns:
        The name of the path, and the path.

    Raises:
        ConfigError: the requested path is unknown, not installed, or not for this device and precision.
    """
    half_on_cuda = device.type == "cuda" and dtype != torch.float32
    if choice == "auto":
        fastest: list[AttentionChoice] = [name for name, package in _PACKAGES.items() if find_spec(package)]
        choice = [*fastest, "varlen"][0] if half_on_cuda else "sdpa"
    if choice == "sdpa":
        return "segment_sdpa", segment_sdpa
    if choice not in get_args(AttentionChoice):
        raise ConfigError(
            f"training.attention={choice!r} is unknown; use one of {', '.join(get_args(AttentionChoice))}"
        )
    if not half_on_cuda:
        raise ConfigError(
            f"training.attention={choice!r} needs bf16 on CUDA, this run has {dtype} on {device.type}; use 'auto'"
        )
    package = _PACKAGES.get(choice)
    if package and not find_spec(package):
        raise ConfigError(
            f"training.attention={choice!r} needs {package}, which is not installed; "
            "pip install -e '.[gpu]' in the repository's folder, or use 'auto'"
        )
    if choice == "transformer_engine":
        from dit.kernels.te_attention import TEAttention  # imports the package

        return choice, TEAttention()
    return choice, flash_attention if choice == "flash_attn" else varlen_attention


def resolve_blocks(device: torch.device, dtype: torch.dtype) -> BlockAttention:
    """Select the block kernel of this process."""
    return EagerBlocks() if device.type == "cpu" or dtype == torch.float32 else FlashBlocks()
