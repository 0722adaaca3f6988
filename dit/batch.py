"""The contract between data and training: a pack of samples and its layout.

Shape suffixes: T packed tokens, S samples in the pack, C latent channels per token, K packed text tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Optional

import torch
from torch import Tensor

from dit.conditions import Condition, Conditions
from dit.errors import BatchError
from dit.layout import SequenceLayout


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

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """Move every tensor to `device`."""
        moved: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, Tensor | Conditions):
                moved[part.name] = value.to(device, non_blocking=non_blocking)
            elif isinstance(value, SequenceLayout):
                moved[part.name] = value.to(device)
        return replace(self, **moved)

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
        for name in ("loss_weight_S", "draws_S"):
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

    def grid(self, patch_temporal: int, patch_spatial: int) -> Tensor:
        """Return the latents unpatchified as one dense `[S, C, t, h, w]` tensor, for convolutional backbones.

        Raises:
            BatchError: the samples differ in shape, or the pack has padding.
        """
        from dit.patchify import unpatchify

        if len(set(self.grids)) != 1 or self.layout.uniform_length is None:
            raise BatchError(
                "a convolutional backbone needs samples of one shape without padding, "
                f"got grids {sorted(set(self.grids))}; bucket the data by shape"
            )
        tokens = self.latents_TC.view(self.layout.num_samples, -1, self.latents_TC.shape[1])
        return torch.stack([unpatchify(x, self.grids[0], patch_temporal, patch_spatial) for x in tokens])
