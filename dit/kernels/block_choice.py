"""Which implementation attends to one block of keys; ring attention and the attention of compiled layers ask."""

from dit.kernels.attention_blocks import BlockAttention, EagerBlocks, FlashBlocks
from dit.kernels.choice import Implementation, Op, half_on_cuda, head_sizes

# torch's flash kernels are called without its padding of heads.
TORCH_FLASH = (half_on_cuda, head_sizes(multiple_of=8, largest=256))

ATTENTION_BLOCKS = Op[BlockAttention](
    "attention_blocks",
    (Implementation("flash", FlashBlocks, TORCH_FLASH), Implementation("eager", EagerBlocks)),
)
"""Attention to one block of keys, of which ring attention is made, see `attention_blocks`."""
