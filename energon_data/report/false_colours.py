"""Pictures of latents without their decoder: principal components in false colours."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dit.sampling.grid import PIXEL_CHANNELS

DEVIATIONS = 2.5
"""Number of standard deviations of a component that map to the full range of its colour."""


@dataclass(frozen=True)
class FalseColours:
    """Maps latents to red, green and blue: the first three principal components of all tiles.

    Equal colours mean equal latents, except for the other components; a single colour has no meaning.

    Attributes:
        mean_C, basis_CR, std_R: mean, basis and deviations of the latents; R is the smaller of 3 and the number of
            channels.
        explained: share of the variance that the components explain.
    """

    mean_C: Tensor
    basis_CR: Tensor
    std_R: Tensor
    explained: float

    @classmethod
    def of(cls, frames: Sequence[Tensor]) -> "FalseColours":
        """Compute the components of frames `[C, H, W]` with equal numbers of channels, over all positions.

        The sign of a component is chosen so that its largest weight is positive.
        """
        values_NC = torch.cat([frame.flatten(1).T for frame in frames]).double()
        mean_C = values_NC.mean(0)
        centred_NC = values_NC - mean_C
        variances, vectors = torch.linalg.eigh(centred_NC.T @ centred_NC / len(values_NC))
        variances, vectors = variances.flip(0).clamp(min=0), vectors.flip(1)
        basis_CR = vectors[:, :3]
        largest = basis_CR.gather(0, basis_CR.abs().argmax(0, keepdim=True))
        total = float(variances.sum())
        return cls(
            mean_C,
            basis_CR * torch.where(largest < 0, -1.0, 1.0),
            variances[:3].sqrt(),
            float(variances[:3].sum()) / total if total else 1.0,
        )

    def __call__(self, frame: Tensor) -> Tensor:
        """Return the picture `[3, H, W]` in [-1, 1] of a frame `[C, H, W]`; grey is the mean."""
        parts = torch.einsum("chw,cr->rhw", frame.double() - self.mean_C[:, None, None], self.basis_CR)
        parts = parts / (DEVIATIONS * self.std_R).clamp(min=1e-9)[:, None, None]
        picture = torch.zeros(3, *frame.shape[1:])
        picture[: len(parts)] = parts.clamp(-1, 1).float()
        return picture

    def stated(self) -> str:
        """Describe the colours."""
        names = ("red", "red and green", "red, green and blue")[len(self.std_R) - 1]
        return (
            f"latents in false colours: {names} are their first {len(self.std_R)} principal components, "
            f"{self.explained:.0%} of their variance; --vae decodes them"
        )


def coloured(frames: Sequence[Tensor]) -> tuple[list[Tensor], str]:
    """Return pictures `[1 or 3, H, W]` of frames `[C, H, W]`, and a note on their colours, empty for pixels."""
    by_channels: dict[int, list[Tensor]] = {}
    for frame in frames:
        by_channels.setdefault(len(frame), []).append(frame)
    maps = {c: FalseColours.of(alike) for c, alike in by_channels.items() if c not in PIXEL_CHANNELS}
    pictures = [maps[len(frame)](frame) if len(frame) in maps else frame for frame in frames]
    return pictures, "; ".join(colour_map.stated() for colour_map in maps.values())


def middle_frame(clip: Tensor) -> Tensor:
    """Return the middle frame `[C, H, W]` of a clip `[C, T, H, W]`, as a copy."""
    return clip[:, clip.shape[1] // 2].clone()
