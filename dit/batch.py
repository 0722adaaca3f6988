"""The contract between data and training: a pack of samples and its layout.

Shape suffixes: T packed tokens, S samples in the pack, C latent channels per token, K packed text tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Optional

import torch
from torch import Tensor

from dit.conditions import Condition, Conditions, moved
from dit.errors import BatchError
from dit.layout import SequenceLayout


@dataclass(frozen=True)
class RawSamples:
    """What encoders on the training device turn into latents and texts: `dit.encoders.online`.

    Attributes:
        pixels: `[3, T, H, W]` uint8 of each sample, before any repetition of an image; None if the pack has latents.
        captions: of each sample; None if the pack has embeddings.
    """

    pixels: Optional[tuple[Tensor, ...]] = None
    captions: Optional[tuple[str, ...]] = None


def pixel_values(pixels: Tensor) -> Tensor:
    """Return uint8 pixels as float32 in [-1, 1], of the same shape."""
    return pixels.float() / 127.5 - 1


@dataclass
class PackedBatch:
    """One micro-batch: the samples of one pack (a dense batch is a pack of equally long samples).

    Attributes:
        latents_TC: clean latents, patchified, dimensionless after VAE scale and shift.
        positions_T3: (t, h, w) patch index of each token, int64.
        layout: of the samples on the token axis.
        sample_ids_S: 63-bit id of each sample, int64; a part of the counter of its noise.
        grids: (t, h, w) in patches of each sample, on the host.
        keys: name of each sample, for messages.
        conditions: the inputs of the network besides the latents, by name.
        loss_weight_S: weight of each sample in the loss, float32; None for ones.
        draws_S: number of each sample's draw from the training data, int64; it is unique in a step and distinguishes
            copies of a sample. None for data that are read once, such as held-out data.
        dropout_S: key of each sample's dropout of activations, int64; None outside training, where nothing is dropped.
        repeated: another rank has this micro-batch, too. Held-out passes repeat micro-batches so that all ranks run the
            same number of forward passes; a repeated one does not count in any sum.
        raw: what is still to be encoded; None for nothing. Until then `latents_TC` are zeros where pixels are to become
            latents, and the texts' conditions are missing.
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
    dropout_S: Optional[Tensor] = None
    repeated: bool = False
    raw: Optional[RawSamples] = None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """Move every tensor to `device`; with `non_blocking` the device goes on with earlier work meanwhile.

        Raises:
            BatchError: the pack is still to be encoded.
        """
        if self.raw is not None:
            raise BatchError(
                f"the pack of {', '.join(self.keys[:3])}, ... holds pixels or captions; encode it first "
                "(dit.encoders.online.batch_encoder)"
            )
        parts: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, Tensor):
                parts[part.name] = moved(value, device, non_blocking)
            elif isinstance(value, Conditions):
                parts[part.name] = value.to(device, non_blocking=non_blocking)
            elif isinstance(value, SequenceLayout):
                parts[part.name] = value.to(device)
        return replace(self, **parts)

    def validate(self, wanted: Sequence[Condition] = (), *, patch_volume: int = 1) -> "PackedBatch":
        """Check the batch against its own layout and the conditions a model takes; return it.

        Args:
            wanted: the model's conditions.
            patch_volume: latent positions in a patch of the model.

        Raises:
            BatchError: lengths disagree, a condition is missing or of another shape, or a class is out of range.
        """
        S, T = self.layout.num_samples, self.layout.total_tokens
        sizes = {
            "latents_TC": (len(self.latents_TC), T),
            "positions_T3": (len(self.positions_T3), T),
            "sample_ids_S": (len(self.sample_ids_S), S),
            "grids": (len(self.grids), S),
            "keys": (len(self.keys), S),
        }
        for name in ("loss_weight_S", "draws_S", "dropout_S"):
            value = getattr(self, name)
            if value is not None:
                sizes[name] = (len(value), S)
        wrong = [f"{k} has {have} rows, needs {need}" for k, (have, need) in sizes.items() if have != need]
        for grid, length, key in zip(self.grids, self.layout.lengths, self.keys):
            if grid[0] * grid[1] * grid[2] != length:
                wrong.append(f"sample {key!r} has grid {grid} but {length} tokens")
        wrong.extend(self.conditions.problems(wanted, self.layout, self.keys, patch_volume))
        if wrong:
            raise BatchError("; ".join(wrong))
        return self

    def dense(self, x_TC: Tensor) -> Tensor:
        """Return tokens of all samples as one dense `[S, t, h, w, C]` tensor, for convolutional backbones.

        Without padding it is a view: with patch 1, `dense(x)[:, 0].permute(0, 3, 1, 2)` are channels-last pictures
        without a copy. `layout.insert_padding(y.flatten(0, 3))` turns them into tokens again.

        Args:
            x_TC: values of all tokens of the pack; those of padding are dropped.

        Raises:
            BatchError: the samples differ in shape, or they are split over ranks.
        """
        if len(set(self.grids)) != 1 or self.layout.local_indices is not None:
            raise BatchError(
                f"a convolutional backbone needs complete samples of one shape, got grids {sorted(set(self.grids))}"
                f"{'' if self.layout.local_indices is None else ', of which this rank has a part'}; bucket the data by "
                "shape (data.bucket_by_shape=True) and leave parallel.context_parallel_size at 1"
            )
        return self.layout.without_padding(x_TC).view(self.layout.num_samples, *self.grids[0], x_TC.shape[1])

    def unpatchified(self, x_TC: Tensor, patch_temporal: int, patch_spatial: int) -> list[Tensor]:
        """Return the latent of each sample, `[C, T, H, W]`, from tokens of the pack."""
        from dit.patchify import unpatchify

        return [
            unpatchify(x_TC[start : start + length], grid, patch_temporal, patch_spatial)
            for start, length, grid in zip(self.layout.starts, self.layout.lengths, self.grids)
        ]

    def grid(self, patch_temporal: int, patch_spatial: int) -> Tensor:
        """Return the latents unpatchified as one dense `[S, C, t, h, w]` tensor.

        Raises:
            BatchError: see `dense`.
        """
        from dit.patchify import unpatchify

        tokens = self.dense(self.latents_TC).flatten(1, 3)
        return torch.stack([unpatchify(x, self.grids[0], patch_temporal, patch_spatial) for x in tokens])
