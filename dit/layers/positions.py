"""Position embeddings, computed from (t, h, w) patch indices.

Fixed sine-cosine embeddings are added to the tokens once. Three-dimensional rotary embeddings rotate queries and keys.
Learned embeddings are tables with a maximal index.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Optional

import torch
from torch import Tensor, nn

from dit.backends.init import normal
from dit.backends.provider import LayerProvider
from dit.backends.sharding import replicate_on_all_stages
from dit.errors import ConfigError
from dit.kernels.rope import Rotation
from dit.layout import SequenceLayout

SinCos = Literal["sincos_2d", "sincos_3d"]
PositionEmbedding = Literal["none", "sincos_2d", "sincos_3d", "rope_3d", "learned_3d"]
RopeScaling = Literal["ntk", "linear"]
AXES = ("t", "h", "w")


def sincos_1d(position_T: Tensor, size: int) -> Tensor:
    """Embed positions as `size / 2` sines, then cosines, of wavelengths 2 pi ... 20000 pi; float32 `[T, size]`.

    Source: Vaswani et al. 2017, section 3.5, in the half-half order of MAE (He et al. 2022) and DiT.
    """
    frequency = 10000.0 ** -(torch.arange(size // 2, device=position_T.device, dtype=torch.float64) / (size // 2))
    angle = position_T.double()[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1).float()


def check_size(hidden_size: int, kind: str) -> None:
    """Check that the hidden size can be split over the axes, each of which needs a sine and a cosine."""
    smallest = 4 if kind == "sincos_2d" else 12
    if hidden_size % 4 or hidden_size < smallest:
        raise ConfigError(
            f"hidden_size={hidden_size} must be a multiple of 4 and at least {smallest} for {kind} positions"
        )


def sincos(positions_T3: Tensor, hidden_size: int, kind: SinCos) -> Tensor:
    """Embed (t, h, w) patch indices, float32 `[T, hidden_size]`.

    `sincos_2d` is the embedding of DiT, in MAE's order: half of the features for w, half for h; t is ignored.
    `sincos_3d` has a third of the features for each axis, in even sizes; the remainder goes to h and w.
    Indices may be scaled and need not be integers.
    """
    t, h, w = positions_T3.unbind(-1)
    if kind == "sincos_2d":
        return torch.cat([sincos_1d(w, hidden_size // 2), sincos_1d(h, hidden_size // 2)], -1)
    time_size = hidden_size // 6 * 2
    time_size -= (hidden_size - time_size) % 4
    image_size = (hidden_size - time_size) // 2
    return torch.cat([sincos_1d(t, time_size), sincos_1d(h, image_size), sincos_1d(w, image_size)], -1)


def add_sincos(x_TD: Tensor, positions_T3: Tensor, kind: PositionEmbedding) -> Tensor:
    """Add sine-cosine positions to the embedded tokens; other kinds are applied in the layers."""
    if kind == "sincos_2d" or kind == "sincos_3d":
        return x_TD + sincos(positions_T3, x_TD.shape[-1], kind).to(x_TD.dtype)
    return x_TD


def spanning(positions_T3: Tensor, layout: SequenceLayout, grids_S3: Tensor, span: float) -> Tensor:
    """Scale h and w so that images of every resolution span `span` positions on both axes; float64 `[T, 3]`.

    Source: Chen et al. 2023 (PixArt-alpha), arXiv:2310.00426, section 2.4, after Xie et al. 2023 (DiffFit): index x
    training grid / grid of the sample.
    """
    scale_S2 = span / grids_S3[:, 1:].clamp(min=1).double()
    return positions_T3 * layout.per_token(nn.functional.pad(scale_S2, (1, 0), value=1.0))


@dataclass(frozen=True)
class RotaryPositions:
    """Rotary embedding over several axes: the features of a head are split over (t, h, w), and further axes.

    By default, h and w each have a third (rounded down) of the `head_size / 2` pairs of features, and t the rest.

    Attributes:
        head_size: features per head, even and at least 6.
        theta: ratio of the shortest to the longest wavelength of an axis.
        scaling: extension of an axis to `factor` times the training length. `linear` divides the index (Chen et al.
            2023, arXiv:2306.15595); `ntk` increases theta so that the longest wavelength grows by the factor and the
            shortest is unchanged (bloc97 2023; used by Cosmos).
        factors: extension of t, h and w; 1 for none.
        time_only: whether all features rotate with t, for temporal attention.
        axes: features of each axis, even numbers (or 0) that add up to `head_size`. Default: the split above.
        axis_names: names of the axes; those after t, h and w are never extended.

    Source: Su et al. 2021, arXiv:2104.09864, Eq. 34, on each axis; the split of the head is that of Cosmos and Wan.
    """

    head_size: int
    theta: float = 10000.0
    scaling: RopeScaling = "ntk"
    factors: Sequence[float] = (1.0, 1.0, 1.0)
    time_only: bool = False
    axes: Optional[Sequence[int]] = None
    axis_names: Sequence[str] = AXES

    def __post_init__(self) -> None:
        if self.time_only and self.head_size % 2:
            raise ConfigError(
                f"a head of {self.head_size} features (hidden_size / num_attention_heads) has no pairs to rotate with "
                "t; use an even head size, or model.layer_pattern=['full']"
            )
        if not self.time_only and (self.head_size % 2 or self.head_size < 6):
            raise ConfigError(
                f"a head of {self.head_size} features (hidden_size / num_attention_heads) has no pair for each of t, h "
                "and w; position_embedding='rope_3d' needs an even head size of at least 6"
            )
        if self.axes is not None:
            names = self.axis_names
            if len(self.axes) != len(names) or any(size % 2 for size in self.axes):
                raise ConfigError(
                    f"model.rope_axes={list(self.axes)} must be {len(names)} even numbers, one for each of "
                    f"{', '.join(names)}; 0 for none"
                )
            if sum(self.axes) != self.head_size:
                raise ConfigError(
                    f"model.rope_axes={list(self.axes)} add up to {sum(self.axes)}, but a head has {self.head_size} "
                    "features (hidden_size / num_attention_heads); they must be equal"
                )
        if len(self.factors) != 3:
            raise ConfigError(
                f"model.rope_factors={list(self.factors)} must be three numbers, for t, h and w; 1 for none"
            )

    def pairs(self) -> tuple[int, ...]:
        """Return the number of feature pairs that rotate with each axis."""
        if self.axes is not None:
            return tuple(size // 2 for size in self.axes)
        image = 0 if self.time_only else self.head_size // 6
        return self.head_size // 2 - 2 * image, image, image

    def angles(self, positions_TA: Tensor) -> Tensor:
        """Return the angle of each pair of features, float64 `[T, head_size / 2]`."""
        parts = []
        for axis, count in enumerate(self.pairs()):
            index_T, theta = positions_TA[:, axis].double(), self.theta
            factor = self.factors[axis] if axis < len(AXES) else 1.0
            if self.scaling == "linear":
                index_T = index_T / factor
            elif count > 1:
                # The longest wavelength is 2 pi theta ** ((count - 1) / count).
                theta = theta * factor ** (count / (count - 1))
            frequency = theta ** -(torch.arange(count, device=index_T.device, dtype=torch.float64) / count)
            parts.append(index_T[:, None] * frequency)
        return torch.cat(parts, -1)

    def __call__(self, positions_TA: Tensor) -> Rotation:
        """Return the rotation of tokens at (t, h, w) patch indices, and their indices on further axes."""
        angles = self.angles(positions_TA)[:, None]
        return Rotation(angles.cos().float(), angles.sin().float())


class LearnedPositions(nn.Module):
    """The sum of three learned vectors, one for each of t, h and w (factorised learnable positions).

    They are replicated over pipeline stages, because every layer adds them; gradients are summed over the stages.

    Args:
        max_grid: sizes of the tables: the largest number of patches along t, h and w.

    Source: Polyak et al. 2024 (Movie Gen), arXiv:2410.13720, section 3.1.2, after NaViT (Dehghani et al. 2023).
    """

    def __init__(self, max_grid: Sequence[int], hidden_size: int, provider: LayerProvider) -> None:
        super().__init__()
        self.t, self.h, self.w = (provider.parameter((n, hidden_size), normal(0.02)) for n in max_grid)
        replicate_on_all_stages(self.parameters())

    def forward(self, positions_T3: Tensor) -> Tensor:
        """Embed (t, h, w) patch indices, `[T, hidden_size]`."""
        t, h, w = positions_T3.unbind(-1)
        embedding = nn.functional.embedding
        return embedding(t, self.t) + embedding(h, self.h) + embedding(w, self.w)
