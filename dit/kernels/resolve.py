"""The ops of this package and their implementations, of which `dit.kernels.choice.choose` selects one.

Each op has one file. It has an eager implementation, the reference on every device, and may have faster ones. `auto`
takes torch's own kernels; those of other packages only once `tests/gpu` has passed with them on a device.
"""

from dit.kernels.attention import Attention, flash_attention, segment_sdpa, varlen_attention
from dit.kernels.attention_blocks import BlockAttention, EagerBlocks, FlashBlocks
from dit.kernels.choice import UNTRIED, Implementation, Op, half_on_cuda, head_sizes, installed, on_cuda_or_interpreted
from dit.kernels.layer_kernels import EAGER, LayerKernels, fused
from dit.kernels.te_attention import TEAttention

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


LAYERS = Op[LayerKernels](
    "layers",
    (
        Implementation("triton", fused, (on_cuda_or_interpreted, installed("triton")), UNTRIED),
        Implementation("eager", lambda: EAGER),
    ),
    setting="training.kernels",
)
"""Norms, modulation, residuals, heads, rotary positions and activations, see `layer_kernels`."""


OPS: tuple[Op[object], ...] = (
    ATTENTION,
    ATTENTION_BLOCKS,
    LAYERS,
)
"""All ops of this package."""
