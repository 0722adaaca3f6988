"""Floating-point operations of a training step, in three conventions. Do not compare numbers across conventions.

| convention | tokens | adaLN | use |
|---|---|---|---|
| `model` | real tokens | once per sample | the default: operations of the model's formulas |
| `hardware` | all tokens, padding included | once per sample | operations executed, recomputed activations included |
| `nemo` | real tokens | once per token | comparison with the published tables of NeMo's diffusion framework only |

A multiply-add counts as two operations. `model` and `hardware` trace the forward pass, so attention counts the pairs of
tokens that it visits; `nemo` counts every pair of a sample. The backward pass costs twice the forward pass. If only
adapters (LoRA) are trained it costs the same as the forward pass, because frozen weights have no gradients; gradients
of the adapters, a few percent, are not counted. Of the networks that an objective adds, only a discriminator is
counted. Counts are for the full pack: divide by the ranks that share it.
"""

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Literal, Optional

from dit.auxiliary import NO_NETWORKS, AuxiliaryNetworks
from dit.batch import PackedBatch
from dit.layout import SequenceLayout
from dit.models.base import ModelConfig
from dit.models.expert_options import ExpertOptions
from dit.parallel.build import parameter_shapes
from dit.patchify import Grid
from dit.tracing.forward import forward_cost

Convention = Literal["model", "hardware", "nemo"]


def shape_of(pack: PackedBatch) -> tuple[SequenceLayout, list[Grid], Optional[SequenceLayout]]:
    """Return the arguments of `PackFlops.training` for a pack: layout, grids and layout of the texts.

    With reference tokens, the work is that of a sample of one row with all tokens. Tokens of a second text and of a
    picture (HunyuanVideo) count as tokens of the text, with which they pass through all joint layers.
    """
    samples = zip(pack.grids, pack.layout.lengths)
    grids = [grid if prod(grid) == tokens else (1, 1, tokens) for grid, tokens in samples]
    texts = [entry.layout for _, entry in pack.conditions.items() if entry.layout is not None]
    if len(texts) > 1:
        lengths = [sum(of_sample) for of_sample in zip(*(x.lengths for x in texts))]
        texts = [SequenceLayout.from_lengths(lengths, may_be_empty=True)]  # `dit.fixed_packs` appends empty samples
    return pack.layout, grids, texts[0] if texts else None


class PackFlops:
    """Counts the operations of a model's packs."""

    def __init__(self, model: ModelConfig, auxiliary: AuxiliaryNetworks = NO_NETWORKS) -> None:
        self.model, self._discriminator, self._passes = model, auxiliary.discriminator, auxiliary.extra_passes
        self._cost = forward_cost(model)

    def forward(
        self,
        layout: SequenceLayout,
        grids: Sequence[Grid],
        context_layout: Optional[SequenceLayout] = None,
        *,
        convention: Convention = "model",
        recomputed: float = 0.0,
    ) -> int:
        """Count one forward pass over a pack.

        Args:
            grids: (t, h, w) in patches of its samples; zeros for a sample without tokens.
            context_layout: layout of its texts; None counts the null text of each sample.
            recomputed: share of the layers that run once more; counted only in the `hardware` convention.
        """
        if convention == "nemo":
            sizes = self.model.megatron_sizes()
            pairs = sum(n * n for n in layout.lengths)
            return round(2 * self._weights * layout.valid_tokens) + 4 * sizes.num_layers * sizes.hidden_size * pairs
        texts = [1] * len(grids) if context_layout is None else context_layout.lengths
        total = layers = 0
        for grid, text in zip(grids, texts, strict=True):
            if prod(grid):  # `dit.fixed_packs` appends empty samples
                sample = self._cost.of_sample(grid, text)
                total, layers = total + sample.total, layers + sample.layers
        if convention == "model":
            return total
        if padding := layout.total_tokens - layout.valid_tokens:
            row = self._cost.of_padding(grids[0])
            total, layers = total + padding * row.total, layers + padding * row.layers
        return total + round(recomputed * layers)

    def training(
        self,
        layout: SequenceLayout,
        grids: Sequence[Grid],
        context_layout: Optional[SequenceLayout] = None,
        *,
        convention: Convention = "model",
        recomputed: float = 0.0,
    ) -> int:
        """Count a forward and a backward pass over a pack, and the extra passes of the objective; see `forward`."""
        pack = layout, grids, context_layout
        backward = 2 if self.model.adapters is None else 1
        total = self.forward(*pack, convention=convention, recomputed=recomputed)
        total += (backward + self._passes) * self.forward(*pack, convention=convention)
        if self._discriminator is not None:
            channels, patch = self.model.in_channels, self.model.patch_spatial
            pictures = ((t, h * patch, w * patch) for t, h, w in grids)
            total += sum(t * self._discriminator.training_flops(channels, h, w) for t, h, w in pictures)
        return total

    def of_pack(self, pack: PackedBatch) -> int:
        return self.training(*shape_of(pack))

    @cached_property
    def _weights(self) -> float:
        """Number of weights that NeMo multiplies with every token: all except those of the text's keys and values.

        Of experts, those of the mean number of experts per token.
        """
        shapes, model = parameter_shapes(self.model), self.model
        share = model.experts_per_token / (model.num_experts or 1) if isinstance(model, ExpertOptions) else 1
        return sum(
            prod(shape) * (share if ".experts." in name else 1)
            for name, shape in shapes.items()
            if not name.endswith("cross_attention.linear_kv.weight")
        )
