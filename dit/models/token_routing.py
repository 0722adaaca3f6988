"""Token routing: in training, the middle layers run on a shorter pack with some of the tokens of every sample.

    layers      before       middle     after
    sample a    a0 a1 a2     a0 a2      a0 a1 a2
    sample b    b0 b1        b1         b0 b1

`unchanged`: a1 and b0 leave the middle as they entered it. `fused`: linear(input, output of the middle) of all tokens,
with a learned vector as the output of a1 and b0.

The selection is a function of (key of the sample, token), so it is the same on every layout and pipeline stage. Under
sequence and context parallelism, ranks gather the full pack before the middle and the shorter pack after it; each
takes its part, equally many tokens per rank.

Shape suffixes: T local tokens of the full or the shorter pack, P tokens of the global pack, R real tokens of the global
shorter pack, D hidden size.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Optional

import torch
from torch import Tensor, nn

from dit.backends.init import normal, xavier_uniform
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.context_parallel.attention import ContextAttention
from dit.context_parallel.partition import chunks_per_sample, context_partition
from dit.joint_layout import JointLayout
from dit.kernels.attention import Attention
from dit.layers.routing import expert_capacity, select_tokens
from dit.layers.tokens import gather_from_ranks, shard_tokens, unshard_tokens, with_leading
from dit.layout import SequenceLayout
from dit.levels import with_levels
from dit.models.routing_config import TokenRouted
from dit.philox import MASK32, Words, philox, to_uniform

_PURPOSE = (0x3C6EF372, 0xA54FF53A)
Layers = Callable[[Tensor, PackedBatch, Optional[Tensor]], Tensor]
"""Runs the middle layers on the local tokens of a pack, with the first layer's values of these tokens or None."""


def _words(keys: Tensor, counter: Tensor, use: int) -> Words:
    """Return random words for one of the two uses of a key: 0 for tokens, 1 for samples."""
    return philox((counter, torch.full_like(counter, use), keys & MASK32, keys >> 32 & MASK32), _PURPOSE)


def select_kept(keys_S: Tensor, layout: SequenceLayout, share: float) -> Tensor:
    """Return whether a token of the global pack is kept for the middle layers, bool `[P]`.

    Of every segment of one noise level, ceil((1 - share) x length) random tokens are kept, so at least one.
    """
    pack = layout if layout.local_indices is None else layout.plain
    scores_P = _words(keys_S[pack.segment_ids_T], pack.token_index_T, 0)[0]
    return select_tokens(scores_P[:, None], layout.level_layout, 1 - share)[:, 0]


def shorter_layout(layout: SequenceLayout, share: float, multiple_of: int, pack_multiple_of: int) -> SequenceLayout:
    """Return the layout of the global pack of kept tokens.

    Samples are padded to a multiple of `multiple_of` tokens, and the pack to one of `pack_multiple_of`.
    """
    kept = [expert_capacity(n, 1, 1 - share) for n in layout.level_layout.lengths]
    numbers = (0,) * len(kept) if layout.levels is None else layout.levels.numbers
    counts = (1,) * len(kept) if layout.levels is None else layout.levels.counts
    samples = [list(zip(kept, numbers))[a:b] for a, b in pairwise(accumulate(counts, initial=0))]
    lengths = [sum(n for n, _ in sample) for sample in samples]
    shorter = SequenceLayout.from_lengths(lengths, multiple_of=multiple_of, device=layout.device)
    shorter.total_tokens += -shorter.total_tokens % pack_multiple_of
    return shorter if layout.levels is None else with_levels(shorter, samples)


class TokenRouting(nn.Module):
    """Runs the middle layers of a stage on some of the tokens; `attention` has the context-parallel group."""

    def __init__(self, config: TokenRouted, provider: LayerProvider, attention: Attention) -> None:
        super().__init__()
        assert config.routing is not None
        self.share, self.path_dropout, self.provider = config.routing.share, config.routing.path_dropout, provider
        self.context = attention if isinstance(attention, ContextAttention) else None
        self.fuse: Optional[nn.Linear] = None
        if config.routing.rejoin == "fused":
            size = config.hidden_size
            init = xavier_uniform(2 * size, size)
            self.fuse = provider.replicated_linear(2 * size, size, bias=True, init=init)
            self.mask = provider.parameter((size,), normal(0.02))

    def forward(
        self,
        x_TD: Tensor,
        batch: PackedBatch,
        pack: PackedBatch,
        layout: SequenceLayout,
        layers: Layers,
        values_TGH: Optional[Tensor] = None,
    ) -> Tensor:
        """Run the middle layers.

        Args:
            batch: the pack, with positions and layout before sequence parallelism splits them.
            pack: the same with the leading tokens of `with_leading`, which are never dropped, if `x_TD` has them.
            layout: layout of `x_TD`, after that split.
            values_TGH: the first layer's values of the tokens before that split, for `model.value_residual`.
        """
        keys_S, provider = batch.draw_keys_S, self.provider
        others_TD = x_TD if self.fuse is None else self.mask.expand_as(x_TD)
        if keys_S is None or not self.share:
            y_TD = layers(x_TD, pack, values_TGH)
        else:
            routed, source_T, target_T, kept_T = self._route(batch, keys_S)
            if isinstance(pack.layout, JointLayout):
                routed, _ = with_leading(routed, 1, provider)
            full, shorter = pack.layout, routed.layout
            if values_TGH is not None:
                values_TGH = self._select(values_TGH, source_T, full, shorter)
            y_TD = self._select(unshard_tokens(x_TD, provider), source_T, full, shorter)
            sharded, (y_TD,) = shard_tokens(shorter, provider, y_TD)
            y_TD = layers(y_TD.masked_fill(~sharded.valid_T[:, None], 0.0), routed, values_TGH)
            y_TD = self._select(unshard_tokens(y_TD, provider), target_T, shorter, full)
            if isinstance(full, JointLayout):
                kept_T = full.join(kept_T.new_ones(full.text.total_tokens), kept_T)
            _, (y_TD, kept_T) = shard_tokens(full, provider, y_TD, kept_T)
            y_TD = torch.where(kept_T[:, None], y_TD, others_TD)
        if self.fuse is None:
            return y_TD
        if keys_S is not None:
            uniform_S = to_uniform(_words(keys_S, torch.zeros_like(keys_S), 1)[0])
            y_TD = torch.where(layout.per_token(uniform_S) < self.path_dropout, self.mask.expand_as(y_TD), y_TD)
        return self.fuse(torch.cat([x_TD, y_TD], 1))

    def _select(self, x_T: Tensor, index_T: Tensor, layout: SequenceLayout, selected: SequenceLayout) -> Tensor:
        """Select tokens of all context-parallel ranks, and keep all leading tokens of a `JointLayout`."""
        if not isinstance(layout, JointLayout) or not isinstance(selected, JointLayout):
            return self._gather(x_T).index_select(0, index_T)
        leading_K, x_T = layout.split(x_T)
        return selected.join(leading_K, self._gather(x_T).index_select(0, index_T))

    def _gather(self, x_T: Tensor) -> Tensor:
        return x_T if self.context is None else gather_from_ranks(x_T, self.context.group)

    def _places(self, layout: SequenceLayout, tokens: Tensor) -> Tensor:
        """Convert indices in the global pack to indices in the pack that is gathered rank by rank."""
        if self.context is None:
            return tokens
        size = self.context.group.size()
        order = context_partition(layout, size, self.context.split).order(0, size)
        return tokens if order is None else order[0][tokens]

    def _route(self, batch: PackedBatch, keys_S: Tensor) -> tuple[PackedBatch, Tensor, Tensor, Tensor]:
        """Return the shorter pack, and indices that lead tokens into the middle and out of it.

        Returns:
            The batch with positions and layout of the shorter pack, before sequence parallelism splits them. For each
            of its tokens, the index in the gathered tokens of the full pack. For each token of the full pack, the index
            in the gathered tokens of the shorter pack, and whether it is kept.
        """
        layout, context, provider = batch.layout, self.context, self.provider
        chunks = 1 if context is None else chunks_per_sample(context.group.size(), context.split)
        multiple = 1 if context is None else chunks * provider.token_multiple
        shorter = layout.table(shorter_layout, self.share, multiple, provider.token_multiple)
        kept_P = select_kept(keys_S, layout, self.share)
        kept_R = (~kept_P).to(torch.uint8).argsort(stable=True)[: shorter.valid_tokens]
        source = torch.zeros(shorter.total_tokens, dtype=torch.int64, device=layout.device)
        source = source.index_copy(0, shorter.real_tokens, self._places(layout, kept_R))
        target = torch.zeros_like(kept_P, dtype=torch.int64)
        target = target.index_copy(0, kept_R, self._places(shorter, shorter.real_tokens))
        local = shorter
        if context is not None:
            partition, rank = context_partition(shorter, context.group.size(), context.split), context.group.rank()
            local = shorter.select(partition.indices_RT[rank], local=partition.blocks()[rank].plain)
            source = source[local.local_indices]
            target, kept_P = target[layout.local_indices], kept_P[layout.local_indices]
        positions_T3 = self._gather(batch.positions_T3)[source]
        return replace(batch, positions_T3=positions_T3, layout=local), source, target, kept_P
