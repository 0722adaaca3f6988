"""The ops of this package and their implementations, for selection by `dit.kernels.choice.choose`.

Each op has an eager implementation, the reference on every device, and may have faster ones. `auto` selects kernels of
torch; kernels of other packages are added to `auto` after `tests/gpu` has passed with them.
"""

from typing import Optional

from dit.kernels.adamw import AdamW
from dit.kernels.attention import Attention, flash_attention, segment_sdpa, varlen_attention
from dit.kernels.attention_blocks import BlockAttention, EagerBlocks, FlashBlocks
from dit.kernels.choice import (
    LAYERS_ONLY,
    SLOW_START,
    UNTRIED,
    Implementation,
    Op,
    code_generator,
    half_on_cuda,
    head_sizes,
    installed,
    on_cuda_or_interpreted,
)
from dit.kernels.layer_kernels import EAGER, LayerKernels, fused
from dit.kernels.te_attention import TEAttention
from dit.objectives.addressed_noise import NoiseMixer, mix_eagerly

# torch's flash kernels are called directly, without the padding of head sizes that torch otherwise adds.
TORCH_FLASH = (half_on_cuda, head_sizes(multiple_of=8, largest=256))

ATTENTION = Op[Attention](
    "attention",
    (
        Implementation("transformer_engine", TEAttention, (half_on_cuda, installed("transformer_engine")), UNTRIED),
        Implementation("flash_attn", lambda: flash_attention, (half_on_cuda, installed("flash_attn")), UNTRIED),
        Implementation("varlen", lambda: varlen_attention, TORCH_FLASH),
        Implementation("sdpa", lambda: segment_sdpa),
    ),
    setting="training.attention",
)
"""Attention over packs, see `attention`."""


ATTENTION_BLOCKS = Op[BlockAttention](
    "attention_blocks",
    (Implementation("flash", FlashBlocks, TORCH_FLASH), Implementation("eager", EagerBlocks)),
)
"""Attention to one block of keys, used by ring attention, see `attention_blocks`."""


LAYERS = Op[LayerKernels](
    "layers",
    (
        Implementation("triton", fused, (on_cuda_or_interpreted, installed("triton")), UNTRIED),
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
        Implementation("triton", _fused_mix, (on_cuda_or_interpreted, installed("triton")), UNTRIED),
        Implementation("compile", lambda: mix_eagerly, (), LAYERS_ONLY),
        Implementation("eager", lambda: mix_eagerly),
    ),
    setting="training.kernels",
)
"""Noise mixed with latents, see `AddressedNoise.mix`."""


def _fused_adamw() -> AdamW:
    from dit.kernels.fused.adamw import adamw

    return adamw


OPTIMIZER = Op[Optional[AdamW]](
    "optimizer",
    (
        Implementation("triton", _fused_adamw, (on_cuda_or_interpreted, installed("triton")), UNTRIED),
        Implementation("compile", lambda: None, (), LAYERS_ONLY),
        Implementation("eager", lambda: None),
    ),
    setting="training.kernels",
)
"""AdamW, weight average and model copy in one pass, see `dit.kernels.adamw`; None for Megatron-Core with torch's."""


OPS: tuple[Op[object], ...] = (
    ATTENTION,
    ATTENTION_BLOCKS,
    LAYERS,
    NOISE,
    OPTIMIZER,
)
"""All ops of this package."""
