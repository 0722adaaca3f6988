"""The conditioning vector of every backbone, computed from the backbone's conditions."""

from functools import partial
from typing import Optional

import torch
from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.backends.sharding import replicate_on_all_stages
from dit.batch import PackedBatch
from dit.condition_table import DEFAULT_FPS, FPS, LABEL, POOLED
from dit.layers.embeddings import (
    LabelEmbedder,
    PooledTextEmbedder,
    ScalarEmbedder,
    TimestepEmbedder,
    VectorEmbedder,
)


class Conditioner(nn.Module):
    """The sum of the embeddings of time and, if configured, class, texts, guidance scale, frame rate and size.

    The size is (height, width, duration): height and width of the latent, and its frames divided by the frame rate,
    which is the duration in seconds divided by the autoencoder's temporal compression.

    The module is replicated over pipeline stages, which compute the same vector; gradients are summed over the stages.

    Args:
        hidden_size: width of the conditioning vector.
        time_scale: factor of the objective's time, and of the guidance scale, before their sinusoids.
        frequency_shift: shift of the time's sinusoid, see `timestep_features`.
        num_classes: number of classes, or None.
        context_size: width of the text embeddings whose mean is added to the vector, or None.
        pooled_size: width of the pooled text embedding, or None.
        guidance: guidance scale of a guidance-distilled network, the same for all samples, or None.
        fps: whether to condition on the frame rate.
        size_patch: latent positions per patch along (t, h, w), to condition on height, width and duration, or None.
        bias: whether the embedders of time, guidance and pooled text have biases.
    """

    def __init__(
        self,
        hidden_size: int,
        provider: LayerProvider,
        *,
        time_scale: float,
        frequency_shift: int = 0,
        num_classes: Optional[int] = None,
        context_size: Optional[int] = None,
        pooled_size: Optional[int] = None,
        guidance: Optional[float] = None,
        fps: bool = False,
        size_patch: Optional[tuple[int, int, int]] = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.guidance_scale, self.patch = guidance, size_patch
        scalar = partial(TimestepEmbedder, hidden_size, provider, time_scale=time_scale, bias=bias)
        vector = partial(VectorEmbedder, POOLED.name, hidden_size=hidden_size, provider=provider, bias=bias)
        self.time = scalar(frequency_shift=frequency_shift)
        self.label = None if num_classes is None else LabelEmbedder(num_classes, hidden_size, provider)
        self.text = None if context_size is None else PooledTextEmbedder(context_size, hidden_size, provider)
        self.guidance = None if guidance is None else scalar()
        self.pooled = None if pooled_size is None else vector(pooled_size)
        self.fps = ScalarEmbedder(1, hidden_size, provider) if fps else None
        self.size = None if size_patch is None else ScalarEmbedder(3, hidden_size, provider)
        replicate_on_all_stages(self.parameters())

    def forward(self, time_S: Tensor, batch: PackedBatch) -> Tensor:
        cond_SD = self.time(time_S)
        if self.label is not None:
            cond_SD = cond_SD + self.label(batch.conditions[LABEL.name].values)
        if self.text is not None:
            cond_SD = cond_SD + self.text(batch)
        if self.pooled is not None:
            cond_SD = cond_SD + self.pooled(batch)
        if self.guidance is not None and self.guidance_scale is not None:
            cond_SD = cond_SD + self.guidance(torch.full_like(time_S, self.guidance_scale))
        if self.fps is not None:
            cond_SD = cond_SD + self.fps(_fps(time_S, batch))
        if self.size is not None and self.patch is not None:
            grids_S3 = batch.layout.tensor(batch.grids, torch.float32)
            frames_S, height_S, width_S = (n * side for n, side in zip(grids_S3.unbind(-1), self.patch))
            fps_S = _fps(time_S, batch)
            cond_SD = cond_SD + self.size(height_S, width_S, frames_S / fps_S)
        return cond_SD


def _fps(time_S: Tensor, batch: PackedBatch) -> Tensor:
    rate = batch.conditions.get(FPS.name)
    return torch.full_like(time_S, DEFAULT_FPS) if rate is None else rate.values
