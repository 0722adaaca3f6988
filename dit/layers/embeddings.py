"""Embedders of the conditioning vector: time, sizes, class, pooled text; replicated over tensor-parallel ranks."""

from typing import Optional

import torch
from torch import Tensor, nn

from dit.backends.init import ZEROS, Init, normal, xavier_uniform
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import CONTEXT
from dit.layout import SequenceLayout

Inits = tuple[Init, Init]
NORMAL: Inits = (normal(0.02), normal(0.02))
CONDITION_FEATURES = 256
"""Width of the sinusoid of the time and of every other scalar condition."""


def timestep_features(time_S: Tensor, size: int, max_period: float = 10000.0, *, shift: int = 0) -> Tensor:
    """Embed continuous times as cosines, then sines, of `size / 2` frequencies from 1 to 1 / max_period; float32.

    Angles reach 1000, where float32 has an error of 6e-5, so they are computed in float64.

    Args:
        size: features, even.
        max_period: inverse of the lowest frequency.
        shift: 1 if the last frequency is 1 / max_period (DDPM); 0 if 1 / max_period would follow it (ADM, DiT).

    Source: DDPM's (Ho et al. 2020) sinusoid in the cosine-first order of ADM and DiT.
    """
    half = size // 2
    frequency = max_period ** -(torch.arange(half, device=time_S.device, dtype=torch.float64) / (half - shift))
    angle = time_S.double()[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], -1).float()


class EmbeddingMLP(nn.Module):
    """Linear-SiLU-Linear, the last part of all embedders except `LabelEmbedder`.

    Args:
        inputs, inner, size: widths before, between and after the linear layers.
    """

    def __init__(
        self, inputs: int, inner: int, size: int, provider: LayerProvider, *, bias: bool = True, inits: Inits = NORMAL
    ) -> None:
        super().__init__()
        self.linear_1 = provider.replicated_linear(inputs, inner, bias=bias, init=inits[0])
        self.linear_2 = provider.replicated_linear(inner, size, bias=bias, init=inits[1])

    def project(self, features: Tensor) -> Tensor:
        """Apply both linear layers to features of any precision."""
        return self.linear_2(nn.functional.silu(self.linear_1(features.to(self.linear_1.weight.dtype))))


class TimestepEmbedder(EmbeddingMLP):
    """Sinusoid of the scaled time, then Linear-SiLU-Linear (DiT).

    Args:
        time_scale: factor on the objective's time before the sinusoid; 1000 spans DDPM's classic timesteps.
        features: width of the sinusoid.
        inner_size: width between the linear layers; None for `hidden_size`.
    """

    def __init__(
        self,
        hidden_size: int,
        provider: LayerProvider,
        *,
        time_scale: float,
        features: int = CONDITION_FEATURES,
        inner_size: Optional[int] = None,
        frequency_shift: int = 0,
        bias: bool = True,
        inits: Inits = NORMAL,
    ) -> None:
        super().__init__(features, inner_size or hidden_size, hidden_size, provider, bias=bias, inits=inits)
        self.features, self.time_scale, self.frequency_shift = features, time_scale, frequency_shift

    def forward(self, time_S: Tensor) -> Tensor:
        time_S = time_S.double() * self.time_scale
        return self.project(timestep_features(time_S, self.features, shift=self.frequency_shift))


class ScalarEmbedder(EmbeddingMLP):
    """Sinusoids of several numbers per sample, concatenated, then Linear-SiLU-Linear.

    Source: Podell et al. 2023 (SDXL), arXiv:2307.01952, section 2.2.
    """

    def __init__(self, count: int, hidden_size: int, provider: LayerProvider) -> None:
        super().__init__(count * CONDITION_FEATURES, hidden_size, hidden_size, provider)

    def forward(self, *numbers_S: Tensor) -> Tensor:
        return self.project(torch.cat([timestep_features(x_S, CONDITION_FEATURES) for x_S in numbers_S], -1))


class LabelEmbedder(nn.Module):
    """A learned vector per class, and one for the unconditional case (index `num_classes`)."""

    def __init__(self, num_classes: int, hidden_size: int, provider: LayerProvider) -> None:
        super().__init__()
        self.weight = provider.parameter((num_classes + 1, hidden_size), normal(0.02))

    def forward(self, labels_S: Tensor) -> Tensor:
        return nn.functional.embedding(labels_S, self.weight)


def mean_of_texts(x_KD: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the mean over the tokens of each text `[S, D]`, float32; zeros for empty texts (fixed packs)."""
    return layout.sum_per_sample(x_KD.float()) / layout.lengths_S[:, None].clamp(min=1)


class PooledTextEmbedder(EmbeddingMLP):
    """Mean of each sample's real text tokens, then Linear-SiLU-Linear; a learned vector replaces a missing text."""

    def __init__(self, context_size: int, hidden_size: int, provider: LayerProvider) -> None:
        inits = xavier_uniform(context_size, hidden_size), normal(0.02)
        super().__init__(context_size, hidden_size, hidden_size, provider, inits=inits)
        self.null = provider.parameter((context_size,), ZEROS)

    def forward(self, batch: PackedBatch) -> Tensor:
        text = batch.conditions.get(CONTEXT.name)
        if text is None or text.layout is None:
            return self.project(self.null.expand(batch.layout.num_samples, -1))
        pooled = mean_of_texts(text.values, text.layout).to(self.null.dtype)
        if text.dropped_S is not None:
            pooled = torch.where(text.dropped_S[:, None], self.null, pooled)
        return self.project(pooled)


class VectorEmbedder(EmbeddingMLP):
    """Linear-SiLU-Linear on a vector per sample; a learned vector replaces a dropped or missing vector.

    Args:
        learned_null: whether to learn that vector. False for a condition that is always present and whose values
            already contain its null for dropped vectors.

    Source of the initial weights: pytorch/torchtitan at 9603aa83, experiments/flux (`init_std=0.02`).
    """

    def __init__(
        self,
        condition: str,
        width: int,
        hidden_size: int,
        provider: LayerProvider,
        *,
        bias: bool = True,
        learned_null: bool = True,
    ) -> None:
        super().__init__(width, hidden_size, hidden_size, provider, bias=bias)
        self.condition = condition
        self.null = provider.parameter((width,), ZEROS) if learned_null else None

    def forward(self, batch: PackedBatch) -> Tensor:
        condition = batch.conditions.get(self.condition)
        if condition is None:
            assert self.null is not None  # otherwise every pack has the condition
            return self.project(self.null.expand(batch.layout.num_samples, -1))
        vectors = condition.values.to(self.linear_1.weight.dtype)
        if condition.dropped_S is not None and self.null is not None:
            vectors = torch.where(condition.dropped_S[:, None], self.null, vectors)
        return self.project(vectors)
