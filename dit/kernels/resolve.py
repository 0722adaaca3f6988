"""The ops of this package and their implementations, of which `dit.kernels.choice.choose` selects one.

Each op has one file. It has an eager implementation, the reference on every device, and may have faster ones. `auto`
takes torch's own kernels; those of other packages only once `tests/gpu` has passed with them on a device.
"""

from typing import TypeVar

from dit.kernels.attention import Attention, flash_attention, segment_sdpa, varlen_attention
from dit.kernels.attention_blocks import BlockAttention, EagerBlocks, FlashBlocks
from dit.kernels.choice import UNTRIED, Implementation, Op, half_on_cuda, head_sizes, installed
from dit.kernels.modulation import gated_residual, gelu_tanh, layer_norm_modulate, rms_norm_modulate, swiglu
from dit.kernels.rope import rotate
from dit.kernels.te_attention import TEAttention

T = TypeVar("T")

# torch's flash kernels are called without its padding of heads.
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
"""Attention to one block of keys, of which ring attention is made, see `attention_blocks`."""


def _eager(name: str, function: T) -> Op[T]:
    """Return an op that has its eager form alone."""
    return Op(name, (Implementation("eager", lambda: function),))


OPS: tuple[Op[object], ...] = (
    ATTENTION,
    ATTENTION_BLOCKS,
    _eager("layer_norm_modulate", layer_norm_modulate),
    _eager("rms_norm_modulate", rms_norm_modulate),
    _eager("gated_residual", gated_residual),
    _eager("rotate", rotate),
    _eager("gelu_tanh", gelu_tanh),
    _eager("swiglu", swiglu),
)
"""All ops of this package."""
