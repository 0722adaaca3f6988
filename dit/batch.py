"""The contract between data and training: a pack of samples and its layout.

Shape suffixes: T packed tokens, S samples in the pack, C latent channels per token, K packed text tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Optional

import torch
from torch import Tensor

from dit.conditions import Condition, Conditions
from dit.errors import BatchError
from dit.layout import SequenceLayout
from dit.pack_copy import move
from dit.patchify import unpatchify


@dataclass(frozen=True)
class RawSamples:
    """Pixels and captions that `dit.encoders.online` encodes on the training device.

    Attributes:
        pixels: `[3, T, H, W]` uint8 of each sample, before an image is repeated in time; None if the pack has latents.
        captions: caption of each sample; None if the pack has embeddings.
    """

    pixels: Optional[tuple[Tensor, ...]] = None
    captions: Optional[tuple[str, ...]] = None


def pixel_values(pixels: Tensor) -> Tensor:
    """Return uint8 pixels as float32 in [-1, 1], of the same shape."""
    return pixels.float() / 127.5 - 1


def pixel_bytes(images: Tensor) -> Tensor:
    """Invert `pixel_values`: round values in [-1, 1] to uint8; values outside are clipped."""
    return ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


@dataclass
class PackedBatch:
    """One micro-batch: the samples of one pack (a dense batch is a pack of equally long samples).

    Attributes:
        latents_TC: clean latents, patchified, dimensionless after VAE scale and shift.
        positions_T3: (t, h, w) patch index of each token, int64.
        layout: layout of the samples on the token axis.
        sample_ids_S: 63-bit id of each sample, int64; part of the counter from which its noise is generated.
        grids: (t, h, w) of each sample in patches, on the host. A sample may have clean reference tokens after those of
            its grid (`dit.levels`).
        reference_grids: (t, h, w) of each reference of each sample in patches, on the host; empty if no sample has any.
        keys: name of each sample, for messages.
        conditions: inputs of the network other than the latents, by name.
        loss_weight_S: weight of each sample in the loss, float32; None for ones.
        draws_S: draw number of each sample in the training data, int64. It is unique in a step and distinguishes
            copies of a sample. None for data that are read once, such as validation data.
        draw_keys_S: key of each sample for random numbers inside the network, int64; None outside training, which
            disables dropout and token routing.
        repeated: whether another rank also has this micro-batch. Validation repeats micro-batches so that all ranks run
            the same number of forward passes; repeated ones are excluded from all sums.
        grids_S3: the grids as a tensor, int64; None to copy them to the device when a layer needs them.
        raw: pixels and captions that are not encoded yet; None if there are none. Before encoding, `latents_TC` is zero
            for samples with pixels, and the text conditions are missing.
    """

    latents_TC: Tensor
    positions_T3: Tensor
    layout: SequenceLayout
    sample_ids_S: Tensor
    grids: tuple[tuple[int, int, int], ...]
    keys: tuple[str, ...]
    conditions: Conditions = field(default_factory=Conditions)
    loss_weight_S: Optional[Tensor] = None
    draws_S: Optional[Tensor] = None
    draw_keys_S: Optional[Tensor] = None
    repeated: bool = False
    reference_grids: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    grids_S3: Optional[Tensor] = None
    raw: Optional[RawSamples] = None

    def grid_sizes(self) -> Tensor:
        """Return (t, h, w) of each sample in patches on the device, int64 `[S, 3]`."""
        return self.layout.tensor(self.grids) if self.grids_S3 is None else self.grids_S3

    def picture_sizes(self) -> Tensor:
        """Return (t, h, w) of each sample, then of its references, in patches on the device, int64 `[1 + R, S, 3]`.

        Samples with fewer than R references have zeros.
        """
        references = zip_longest(*self.reference_grids, fillvalue=(0, 0, 0))
        return torch.stack([self.grid_sizes(), *map(self.layout.tensor, references)])

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Copy every tensor to `device`, with the tables that the layouts have; the host does not wait."""
        if self.raw is not None:
            raise BatchError(
                f"the pack of {', '.join(self.keys[:3])}, ... contains raw pixels or captions; encode it first "
                "(dit.encoders.online.batch_encoder)"
            )
        return move(self, torch.device(device))

    def validate(
        self,
        required: Sequence[Condition] = (),
        *,
        patch_volume: int = 1,
        largest_grid: Optional[tuple[int, int, int]] = None,
    ) -> "PackedBatch":
        """Check the batch against its layout and the conditions of a model, and return it.

        Args:
            patch_volume: latent positions in a patch of the model.
            largest_grid: largest numbers of patches along t, h and w; None for no limit.
        """
        S, T = self.layout.num_samples, self.layout.total_tokens
        sizes = {
            "latents_TC": (len(self.latents_TC), T),
            "positions_T3": (len(self.positions_T3), T),
            "sample_ids_S": (len(self.sample_ids_S), S),
            "grids": (len(self.grids), S),
            "keys": (len(self.keys), S),
        }
        for name in ("loss_weight_S", "draws_S", "draw_keys_S"):
            value = getattr(self, name)
            if value is not None:
                sizes[name] = (len(value), S)
        errors = [f"{name} has {rows} rows, needs {need}" for name, (rows, need) in sizes.items() if rows != need]
        for grid, length, key in zip(self.grids, self.layout.lengths, self.keys):
            if math.prod(grid) > length or (math.prod(grid) < length and self.layout.levels is None):
                errors.append(f"sample {key!r} has grid {grid} but {length} tokens")
            if largest_grid is not None and any(n > most for n, most in zip(grid, largest_grid)):
                errors.append(
                    f"sample {key!r} has {grid} patches (t, h, w), but the learned positions end at {largest_grid}; "
                    "raise model.max_grid or drop such samples"
                )
        errors.extend(self.conditions.problems(required, self.layout, self.keys, patch_volume))
        if errors:
            raise BatchError("; ".join(errors))
        return self

    def dense(self, x_TC: Tensor) -> Tensor:
        """Return the tokens of all samples as one dense `[S, t, h, w, C]` tensor, for convolutional backbones.

        The result is a view if the pack has no padding; with patch size 1, `dense(x)[:, 0].permute(0, 3, 1, 2)` is then
        a channels-last image batch. `layout.insert_padding(y.flatten(0, 3))` is the inverse.
        """
        if len(set(self.grids)) != 1 or self.layout.local_indices is not None:
            raise BatchError(
                f"a convolutional backbone needs complete samples of one shape, got grids {sorted(set(self.grids))}"
                f"{'' if self.layout.local_indices is None else ', split over ranks'}; bucket the data by "
                "shape (data.bucket_by_shape=True) and leave parallel.context_parallel_size at 1"
            )
        return self.layout.without_padding(x_TC).view(self.layout.num_samples, *self.grids[0], x_TC.shape[1])

    def unpatchified(self, x_TC: Tensor, patch_temporal: int, patch_spatial: int) -> list[Tensor]:
        """Return the latent of each sample, `[C, T, H, W]`, from the tokens of the pack."""
        return [
            unpatchify(x_TC[start : start + math.prod(grid)], grid, patch_temporal, patch_spatial)
            for start, grid in zip(self.layout.starts, self.grids)
        ]
