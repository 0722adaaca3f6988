"""The conditioning vector of backbones that read their text by cross-attention."""

import torch
from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.backends.sharding import state_every_stage
from dit.batch import PackedBatch
from dit.condition_table import DEFAULT_FPS, FPS, LABEL
from dit.layers.embeddings import LabelEmbedder, ScalarEmbedder, TimestepEmbedder


class Conditioner(nn.Module):
    """The sum of the embeddings of time and, if configured, class, frame rate and size.

    The size is (height, width, duration): height and width of the latent, and its frames divided by the frame rate,
    which is the duration in seconds up to the autoencoder's compression of time.

    Replicated over pipeline stages, which compute the same vector; the gradients of the copies are summed.

    Args:
        num_classes: classes; None for none.
        fps: condition on the frame rate.
        size: condition on height, width and duration.
        patch_temporal, patch_spatial: latent positions per patch.
    """

    def __init__(
        self,
        hidden_size: int,
        provider: LayerProvider,
        *,
        time_scale: float,
        num_classes: int | None,
        fps: bool,
        size: bool,
        patch_temporal: int,
        patch_spatial: int,
    ) -> None:
        super().__init__()
        self.patch = (patch_temporal, patch_spatial, patch_spatial)
        self.time = TimestepEmbedder(hidden_size, provider, time_scale=time_scale)
        self.label = None if num_classes is None else LabelEmbedder(num_classes, hidden_size, provider)
        self.fps = ScalarEmbedder(1, hidden_size, provider) if fps else None
        self.size = ScalarEmbedder(3, hidden_size, provider) if size else None
        state_every_stage(self.parameters())

    def forward(self, time_S: Tensor, batch: PackedBatch) -> Tensor:
        cond_SD = self.time(time_S)
        rate = batch.conditions.get(FPS.name)
        fps_S = torch.full_like(time_S, DEFAULT_FPS) if rate is None else rate.values
        if self.label is not None:
            cond_SD = cond_SD + self.label(batch.conditions[LABEL.name].values)
        if self.fps is not None:
            cond_SD = cond_SD + self.fps(fps_S)
        if self.size is not None:
            grids_S3 = torch.tensor(batch.grids, dtype=torch.float32, device=time_S.device)
            frames_S, height_S, width_S = (n * side for n, side in zip(grids_S3.unbind(-1), self.patch))
            cond_SD = cond_SD + self.size(height_S, width_S, frames_S / fps_S)
        return cond_SD
