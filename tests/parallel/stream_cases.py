"""The ways in which the tests of FLUX and Wan break a model on purpose."""

from types import SimpleNamespace

from dit.layers.attention import WidthRMSNorm


def norm_own_heads_alone(chunks: list) -> None:
    """Normalise queries and keys over the heads of one rank instead of all."""
    for module in chunks[0].modules():
        if isinstance(module, WidthRMSNorm):
            module.provider = SimpleNamespace(sum_over_tensor_ranks=lambda x: x)
            module.width //= 2


def forget_text_tokens(chunks: list) -> None:
    """As if every tensor-parallel rank met all text rows: the gradients of the text's embedding are not summed."""
    chunks[0].embed_text.bias.sequence_parallel = False
