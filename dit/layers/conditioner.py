"""The conditioning vector of every backbone, computed from the backbone's conditions."""

from functools import partial
from typing import Optional

import torch
from torch import Tensor, nn

from dit.backends.init import ZEROS, normal
from dit.backends.provider import LayerProvider
from dit.backends.sharding import replicate_on_all_stages
from dit.batch import PackedBatch
from dit.condition_table import DEFAULT_FPS, FPS, LABEL, POOLED
from dit.layers.embeddings import LabelEmbedder, PooledTextEmbedder, ScalarEmbedder, TimestepEmbedder, VectorEmbedder


class Conditioner(nn.Module):
    """The sum of the embeddings of time and, if configured, class, texts, guidance scale, frame rate and size.

    The size is (height, width, duration): height and width of the latent, and its frames divided by the frame rate,
    which is the duration in seconds divided by the autoencoder's temporal compression.

    The module is replicated over pipeline stages, which compute the same vector; gradients are summed over the stages.

    Args:
        time_scale: factor of the objective's time, and of the guidance scale, before their sinusoids.
        inner_size: width between the linear layers of the embedders of time and guidance; None for `hidden_size`.
        frequency_shift: shift of the time's sinusoid, see `timestep_features`.
        context_size: width of the text embeddings whose mean is added to the vector, or None.
        learned_null: whether a learned vector replaces a dropped or missing pooled text, see `VectorEmbedder`.
        guidance: guidance scale of a guidance-distilled network, the same for all samples, or None.
        size_patch: latent positions per patch along (t, h, w), to condition on height, width and duration, or None.
        interval: whether to add an embedding of the length of a time interval, which starts at zero.
    """

    def __init__(
        self,
        hidden_size: int,
        provider: LayerProvider,
        *,
        time_scale: float,
        inner_size: Optional[int] = None,
        frequency_shift: int = 0,
        num_classes: Optional[int] = None,
        context_size: Optional[int] = None,
        pooled_size: Optional[int] = None,
        learned_null: bool = True,
        guidance: Optional[float] = None,
        fps: bool = False,
        size_patch: Optional[tuple[int, int, int]] = None,
        interval: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.guidance_scale, self.patch = guidance, size_patch
        scalar = partial(
            TimestepEmbedder, hidden_size, provider, time_scale=time_scale, inner_size=inner_size, bias=bias
        )
        vector = partial(VectorEmbedder, POOLED.name, hidden_size=hidden_size, provider=provider, bias=bias)
        self.time = scalar(frequency_shift=frequency_shift)
        self.interval = scalar(inits=(normal(0.02), ZEROS)) if interval else None
        self.label = None if num_classes is None else LabelEmbedder(num_classes, hidden_size, provider)
        self.text = None if context_size is None else PooledTextEmbedder(context_size, hidden_size, provider)
        self.guidance = None if guidance is None else scalar()
        self.pooled = None if pooled_size is None else vector(pooled_size, learned_null=learned_null)
        self.fps = ScalarEmbedder(1, hidden_size, provider) if fps else None
        self.size = None if size_patch is None else ScalarEmbedder(3, hidden_size, provider)
        replicate_on_all_stages(self.parameters())

    def forward(self, time_L: Tensor, batch: PackedBatch) -> Tensor:
        """Return the vector of each noise level `[L, hidden_size]`; other conditions are per sample.

        Args:
            time_L: `[L]`, or the times t and the lengths t - r of intervals, `[L, 2]`; without lengths they are 0.
        """
        time_L, interval_L = time_L.unbind(-1) if time_L.dim() == 2 else (time_L, torch.zeros_like(time_L))
        cond_LD, per_level = self.time(time_L), batch.layout.per_level
        if self.interval is not None:
            cond_LD = cond_LD + self.interval(interval_L)
        if self.label is not None:
            cond_LD = cond_LD + per_level(self.label(batch.conditions[LABEL.name].values))
        if self.text is not None:
            cond_LD = cond_LD + per_level(self.text(batch))
        if self.pooled is not None:
            cond_LD = cond_LD + per_level(self.pooled(batch))
        if self.guidance is not None and self.guidance_scale is not None:
            cond_LD = cond_LD + self.guidance(torch.full_like(time_L, self.guidance_scale))
        if self.fps is not None:
            cond_LD = cond_LD + per_level(self.fps(_fps(batch)))
        if self.size is not None and self.patch is not None:
            grids_S3 = batch.grid_sizes().float()
            frames_S, height_S, width_S = (n * side for n, side in zip(grids_S3.unbind(-1), self.patch))
            cond_LD = cond_LD + per_level(self.size(height_S, width_S, frames_S / _fps(batch)))
        return cond_LD


def _fps(batch: PackedBatch) -> Tensor:
    rate, layout = batch.conditions.get(FPS.name), batch.layout
    return torch.full((layout.num_samples,), DEFAULT_FPS, device=layout.device) if rate is None else rate.values
