"""Online encoding: pixels and captions of a pack become latents and texts on the training device.

    stream -- pixels, captions --> OnlineEncoders -- latents, texts --> full pack -- context-parallel split --> step

The tensor- and context-parallel ranks of a pipeline stage read the same pack. Each encodes a part of it, and an
all-reduce gives all results to all of them: the work is divided, and they have the same bits, which encoders on several
devices need not give. Stages encode for themselves, because in a schedule they are at different micro-batches.

Nothing is drawn: a latent is the mean of the VAE's posterior, as in preparation, so that online equals cached.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import PackedBatch, pixel_values
from dit.conditions import Condition, Conditions, moved, pack_conditions
from dit.data_api import BatchSpec, DataConfig, OnlineEncoding
from dit.encoders.batching import in_batches
from dit.encoders.text import TextEncoder, empty_texts, join_entries
from dit.encoders.text_config import as_conditions, check_text_encoder
from dit.encoders.vae import VAE
from dit.patchify import patchify_all

MAX_BATCH_PIXELS = 1 << 20
"""Pixels (of all frames) that the VAE encodes together, unless a single sample has more."""

Encode = Callable[[PackedBatch], PackedBatch]


def null_texts(data: DataConfig, wanted: Sequence[Condition], device: torch.device) -> dict[str, Tensor]:
    """Return the embeddings of the empty text for the conditions whose null it is, `[k, D]` by name.

    Args:
        data: states them, or their encoders.
        wanted: conditions of the model.

    Raises:
        ConfigError: the data name no encoder, or one that makes no such text.
    """
    stated = {c.name: text for c in wanted if c.null == "empty text" and (text := data.empty_text(c)) is not None}
    others = [condition for condition in wanted if condition.name not in stated]
    return {
        **{name: text.to(device) for name, text in stated.items()},
        **empty_texts(data.text_encoder(), others, device),
    }


def batch_encoder(
    encoding: Optional[OnlineEncoding],
    spec: BatchSpec,
    device: torch.device,
    peers: Optional[dist.ProcessGroup],
    nulls: Mapping[str, Tensor],
) -> Encode:
    """Return the function that encodes the micro-batches of a data source, unless its samples are encoded already.

    Args:
        nulls: embeddings of the empty text, added to the texts of every pack; see `Conditions.with_nulls`.
    """
    encode: Encode = (lambda batch: batch) if encoding is None else OnlineEncoders(encoding, spec, device, peers)

    def with_nulls(batch: PackedBatch) -> PackedBatch:
        encoded = encode(batch)
        return replace(encoded, conditions=encoded.conditions.with_nulls(nulls))

    return with_nulls if nulls else encode


class OnlineEncoders:
    """The encoders of a run, frozen, on its device.

    Args:
        encoding: which.
        spec: the conditions that the model takes; encoders of others are not loaded.
        device: of the training.
        peers: the ranks that read the same packs at the same time; None for this rank alone.
    """

    def __init__(
        self, encoding: OnlineEncoding, spec: BatchSpec, device: torch.device, peers: Optional[dist.ProcessGroup]
    ) -> None:
        self.spec, self.device, self.peers = spec, device, peers
        self.max_text_tokens = encoding.max_text_tokens
        where, precision = str(device), encoding.precision
        self.vae = None if encoding.vae is None else VAE(encoding.vae, device=where, precision=precision)
        self.texts: list[TextEncoder] = []
        for config in () if encoding.text_encoder is None else check_text_encoder(encoding.text_encoder).encoders:
            taken = as_conditions({entry: entry for entry in config.makes}, spec.conditions)
            if taken:
                config = replace(config, makes=tuple(taken.values()), joined=config.joined and "text" in taken.values())
                self.texts.append(TextEncoder(config, device=where, precision=precision))

    @torch.no_grad()
    def __call__(self, batch: PackedBatch) -> PackedBatch:
        """Encode a full pack; every peer calls this with the same one.

        Returns:
            The pack with latents and texts, those on the device.
        """
        raw = batch.raw
        if raw is None:
            return batch
        latents_TC, texts = batch.latents_TC, Conditions()
        if raw.pixels is not None:
            latents_TC = self._latents(batch, raw.pixels)
        if raw.captions is not None:
            texts = self._texts(batch, raw.captions)
        return replace(batch, latents_TC=latents_TC, conditions=batch.conditions | texts, raw=None)

    def _latents(self, batch: PackedBatch, pixels: Sequence[Tensor]) -> Tensor:
        vae = self.vae
        assert vae is not None

        def encode(indices: list[int]) -> list[Tensor]:
            together = moved(torch.stack([pixels[i] for i in indices]), self.device, non_blocking=True)
            return [vae.encode(pixel_values(together))]

        shapes = [clip.shape[1:] for clip in pixels]
        batches = in_batches(shapes, lambda shape: MAX_BATCH_PIXELS // prod(shape))
        encoded = self._on_all_peers(batches, [[vae.geometry.latent_shape(*shape)] for shape in shapes], encode)
        latents = [  # an image is repeated to fill a patch in time
            latent.expand(-1, grid[0] * self.spec.patch_temporal, -1, -1)
            for (latent,), grid in zip(encoded, batch.grids)
        ]
        return batch.layout.insert_padding(patchify_all(latents, *self.spec.patch))

    def _texts(self, batch: PackedBatch, captions: Sequence[str]) -> Conditions:
        unique = list(dict.fromkeys(captions))
        made = join_entries(self.texts, [self._embed(encoder, unique) for encoder in self.texts])
        by_caption = {
            name: dict(zip(unique, values, strict=True))
            for name, values in as_conditions(made, self.spec.conditions).items()
        }
        given = {name: [values[caption] for caption in captions] for name, values in by_caption.items()}
        return pack_conditions(self.spec.conditions, given, batch.layout, self.spec.patch)

    def _embed(self, encoder: TextEncoder, texts: Sequence[str]) -> dict[str, list[Tensor]]:
        ids, makes, sizes = encoder.tokenize(texts), encoder.config.makes, encoder.geometry

        def encode(indices: list[int]) -> list[Tensor]:
            made = encoder.forward(torch.tensor([ids[i] for i in indices]))
            return [made[entry] for entry in makes]

        shapes = [
            [(sizes.pooled or 0,) if entry == "pooled" else (len(numbers), sizes.width) for entry in makes]
            for numbers in ids
        ]
        encoded = self._on_all_peers(encoder.batches(ids), shapes, encode)
        return {
            entry: [rows[place] if entry == "pooled" else rows[place][: self.max_text_tokens] for rows in encoded]
            for place, entry in enumerate(makes)
        }

    def _on_all_peers(
        self,
        batches: Sequence[list[int]],
        shapes: Sequence[Sequence[Sequence[int]]],
        encode: Callable[[list[int]], Sequence[Tensor]],
    ) -> list[list[Tensor]]:
        """Encode the batches in turn on the peers.

        Args:
            batches: indices of the items of each. They depend on the pack alone, not on the number of peers.
            shapes: of each result of each item.
            encode: returns each result of the items of a batch, `[B, ...]`.

        Returns:
            The results of each item, float32.
        """
        flat = torch.zeros(sum(prod(shape) for results in shapes for shape in results), device=self.device)
        rest, parts = flat, list[list[Tensor]]()
        for results in shapes:
            parts.append([])
            for shape in results:
                parts[-1].append(rest[: prod(shape)].view(*shape))
                rest = rest[prod(shape) :]
        count, mine = (1, 0) if self.peers is None else (self.peers.size(), self.peers.rank())
        for number, indices in enumerate(batches):
            if number % count != mine:
                continue
            for place, values in enumerate(encode(indices)):
                for i, value in zip(indices, values, strict=True):
                    parts[i][place].copy_(value)
        if count > 1:
            dist.all_reduce(flat, group=self.peers)  # one peer's value plus zeros: exact
        return parts
