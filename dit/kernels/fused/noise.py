"""Counter-based noise mixed with clean latents in one kernel, without writing the noise to memory."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from dit.layout import SequenceLayout


@torch.library.custom_op("dit::mix", mutates_args=())
def mix_op(
    x0_TC: Tensor,
    segments_T: Tensor,
    token_index_T: Tensor,
    ids_S: Tensor,
    seeds_S: Optional[Tensor],
    pairs_K2S: Tensor,
    key0: int,
    key1: int,
    step: int,
) -> list[Tensor]:
    """Return a x0 + b noise for each pair (a, b), float32.

    Args:
        segments_T, token_index_T: sample of each token, and index within the sample.
        seeds_S: seed of each sample; None if the key contains one seed for the pack.
    """
    from dit.kernels.fused.gpu import noise as gpu

    outputs = _outputs(x0_TC, pairs_K2S)
    gpu.mix(x0_TC, segments_T, token_index_T, ids_S, seeds_S, pairs_K2S, (key0, key1), step, outputs)
    return outputs


def _outputs(x0: Tensor, pairs: Tensor) -> list[Tensor]:
    return [torch.empty_like(x0, dtype=torch.float32) for _ in range(len(pairs))]


@mix_op.register_fake
def _(x0, segments, token_index, ids, seeds, pairs, key0, key1, step):  # type: ignore[no-untyped-def]
    return _outputs(x0, pairs)


def mix(
    x0_TC: Tensor,
    layout: SequenceLayout,
    ids_S: Tensor,
    seed: int | Tensor,
    words: tuple[int, int],
    step: int,
    pairs: Sequence[tuple[Tensor, Tensor]],
) -> list[Tensor]:
    """Mix clean latents and noise, see `dit.objectives.addressed_noise.Mix`."""
    coefficients = torch.stack([part.float() for pair in pairs for part in pair]).view(len(pairs), 2, -1)
    pack_seed = seed if isinstance(seed, int) else 0
    key = tuple((word ^ (pack_seed >> shift)) & 0xFFFFFFFF for word, shift in zip(words, (0, 32)))
    seeds_S = None if isinstance(seed, int) else seed.contiguous()
    indices = layout.segment_ids_T.contiguous(), layout.token_index_T.contiguous()
    return mix_op(x0_TC.contiguous(), *indices, ids_S.contiguous(), seeds_S, coefficients, *key, step)
