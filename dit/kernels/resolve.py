"""The ops of this package and their implementations, for selection by `dit.kernels.choice.choose`.

Each op has an eager implementation, the reference on every device, and may have faster ones. `auto` selects kernels of
torch, and other kernels on machines where `tests/gpu` has passed with them (`dit.parallel.verified_kernels`).
"""

import torch

from dit.kernels.adamw import AdamW, AddGradients, adamw
from dit.kernels.attention import Attention, flash_attention, segment_sdpa, torch_flash, varlen_attention
from dit.kernels.attention_blocks import BlockAttention, EagerBlocks, FlashBlocks
from dit.kernels.choice import (
    LAYERS_ONLY,
    SLOW_START,
    UNVERIFIED,
    Implementation,
    Op,
    Target,
    capability,
    capability_from,
    choose,
    code_generator,
    half_on_cuda,
    head_sizes,
    installed,
    not_deterministic,
    on_cuda_or_interpreted,
)
from dit.kernels.layer_kernels import EAGER, LayerKernels, fused
from dit.kernels.te_attention import TEAttention
from dit.objectives.addressed_noise import NoiseMixer, mix_eagerly

AMPERE = capability_from(8, 0, "FlashAttention")
# torch's flash kernels are called directly, without the padding of head sizes that torch otherwise adds.
TORCH_FLASH = (half_on_cuda, head_sizes(multiple_of=8, largest=256))
FLASH = "https://github.com/Dao-AILab/flash-attention says how"

ATTENTION = Op[Attention](
    "attention",
    (
        Implementation(
            "transformer_engine",
            TEAttention,
            (half_on_cuda, installed("transformer_engine"), not_deterministic, head_sizes(8, 256)),
            UNVERIFIED,
        ),
        Implementation(
            "flash_attn_4",
            torch_flash("FA4"),
            # It has kernels for few larger heads, none of them on Blackwell.
            (*TORCH_FLASH, head_sizes(8, 128), installed("flash_attn.cute", FLASH), capability(9, 10)),
            UNVERIFIED,
        ),
        Implementation(
            "flash_attn_3",
            torch_flash("FA3"),
            (*TORCH_FLASH, installed("flash_attn_interface", FLASH), capability(9)),
            UNVERIFIED,
        ),
        Implementation(
            "flash_attn",
            lambda: flash_attention,
            (half_on_cuda, installed("flash_attn"), head_sizes(1, 256), AMPERE),
            UNVERIFIED,
        ),
        Implementation("varlen", lambda: varlen_attention, (*TORCH_FLASH, AMPERE)),
        Implementation("sdpa", lambda: segment_sdpa),
    ),
    setting="training.attention",
)
"""Attention over packs, see `attention`."""


ATTENTION_BLOCKS = Op[BlockAttention](
    "attention_blocks",
    (Implementation("flash", FlashBlocks, (*TORCH_FLASH, AMPERE)), Implementation("eager", EagerBlocks)),
)
"""Attention to one block of keys, used by ring attention, see `attention_blocks`."""


LAYERS = Op[LayerKernels](
    "layers",
    (
        Implementation("triton", fused, (on_cuda_or_interpreted, installed("triton")), UNVERIFIED),
        Implementation("compile", lambda: EAGER, (code_generator,), SLOW_START),  # see `compiled`
        Implementation("eager", lambda: EAGER),
    ),
    setting="training.kernels",
)
"""Norms, modulation, residuals, heads, rotary positions and activations, see `layer_kernels`."""


def _fused_mix() -> NoiseMixer:
    from dit.kernels.fused.noise import mix

    return mix


NOISE = Op[NoiseMixer](
    "noise",
    (
        Implementation("triton", _fused_mix, (on_cuda_or_interpreted, installed("triton")), UNVERIFIED),
        Implementation("compile", lambda: mix_eagerly, (), LAYERS_ONLY),
        Implementation("eager", lambda: mix_eagerly),
    ),
    setting="training.kernels",
)
"""Noise mixed with latents, see `AddressedNoise.mix`."""


def _fused_adamw() -> AdamW:
    from dit.kernels.fused.adamw import adamw

    return adamw


OPTIMIZER = Op[AdamW](
    "optimizer",
    (
        Implementation("triton", _fused_adamw, (on_cuda_or_interpreted, installed("triton")), UNVERIFIED),
        Implementation("compile", lambda: adamw, (), LAYERS_ONLY),
        Implementation("eager", lambda: adamw),
    ),
    setting="training.kernels",
)
"""AdamW, weight average and model copy, see `dit.kernels.adamw`."""


def add_gradients(target: Target, requested: str) -> AddGradients:
    """Return the addition to main gradients that belongs to the selected `OPTIMIZER`.

    Args:
        requested: `training.kernels`.
    """
    if choose(OPTIMIZER, target, requested).name != "triton":
        return torch._foreach_add_
    from dit.kernels.fused.gradients import add_gradients as fused_addition

    return fused_addition


OPS: tuple[Op[object], ...] = (
    ATTENTION,
    ATTENTION_BLOCKS,
    LAYERS,
    NOISE,
    OPTIMIZER,
)
"""All ops of this package."""
