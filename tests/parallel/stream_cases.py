"""Deliberate faults for the tests of FLUX and Wan."""

from types import SimpleNamespace

from dit.layers.attention import WidthRMSNorm


def normalise_local_heads(chunks: list) -> None:
    """Normalise queries and keys over the heads of one rank instead of all."""
    for module in chunks[0].modules():
        if isinstance(module, WidthRMSNorm):
            module.provider = SimpleNamespace(sum_over_tensor_ranks=lambda x: x)
            module.width //= 2


def forget_text_tokens(chunks: list) -> None:
    """Do not sum the gradients of the text embedding over tensor-parallel ranks, as if each rank had all text rows."""
    chunks[0].embed_text.bias.sequence_parallel = False
