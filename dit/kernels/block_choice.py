"""Implementations of attention to one block of keys, used by ring attention and compiled layers."""

from dit.kernels.attention_blocks import BlockAttention, EagerBlocks, FlashBlocks
from dit.kernels.choice import Implementation, Op, half_on_cuda, head_sizes

# torch's flash kernels are called directly, without the padding of head sizes that torch otherwise adds.
TORCH_FLASH = (half_on_cuda, head_sizes(multiple_of=8, largest=256))

ATTENTION_BLOCKS = Op[BlockAttention](
    "attention_blocks",
    (Implementation("flash", FlashBlocks, TORCH_FLASH), Implementation("eager", EagerBlocks)),
)
"""Attention to one block of keys, see `attention_blocks`."""
