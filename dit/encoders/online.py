"""Online encoding: pixels and captions of a pack are encoded to latents and texts on the training device.

    stream -- pixels, captions --> OnlineEncoders -- latents, texts --> full pack -- context-parallel split --> step

The tensor- and context-parallel ranks of a pipeline stage read the same pack. Each encodes a part of it, and an
all-reduce sends all results to all of them. This divides the work and gives the ranks bit-identical results. Every
pipeline stage encodes separately, because stages process different micro-batches at the same time.

A latent is the mean of the VAE's posterior, as in cached latents, so no random numbers are needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import PackedBatch, pixel_values
from dit.conditions import Condition, Conditions, pack_conditions
from dit.data_api import BatchSpec, DataConfig, OnlineEncoding
from dit.encoders.text import TextEncoder, empty_texts, join_entries, texts_as_conditions
from dit.encoders.text_config import as_conditions, check_text_encoder
from dit.encoders.vae import VAE, in_batches
from dit.layout import to_device
from dit.patchify import patchify_all

MAX_BATCH_PIXELS = 1 << 20
"""Largest number of pixels (of all frames) in a VAE batch; a larger sample has its own batch."""

Encode = Callable[[PackedBatch], PackedBatch]


def null_texts(data: DataConfig, conditions: Sequence[Condition], device: torch.device) -> dict[str, Tensor]:
    """Return the embeddings of the empty text for conditions that have it as null, `[k, D]` by name."""
    stored = {c.name: text for c in conditions if c.null == "empty text" and (text := data.empty_text(c)) is not None}
    to_encode = [c for c in conditions if c.null == "empty text" and c.name not in stored]
    encoded = empty_texts(data.text_encoder(), to_encode, device) if to_encode else {}
    return {name: text.to(device) for name, text in stored.items()} | encoded


def batch_encoder(
    encoding: Optional[OnlineEncoding],
    spec: BatchSpec,
    device: torch.device,
    peers: Optional[dist.ProcessGroup],
    nulls: Mapping[str, Tensor],
) -> Encode:
    """Return a function that encodes the micro-batches of a data source, and adds `nulls` to their texts."""
    encode: Encode = (lambda batch: batch) if encoding is None else OnlineEncoders(encoding, spec, device, peers)

    def with_nulls(batch: PackedBatch) -> PackedBatch:
        encoded = encode(batch)
        return replace(encoded, conditions=encoded.conditions.with_nulls(nulls))

    return with_nulls if nulls else encode


class OnlineEncoders:
    """The frozen encoders of a run, on the training device; only those of the model's conditions are loaded.

    Args:
        peers: the ranks that read the same packs at the same time; None for only this rank.
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
            entries = tuple(as_conditions({entry: entry for entry in config.makes}, spec.conditions).values())
            if entries:
                config = replace(config, makes=entries)
                self.texts.append(TextEncoder(config, device=where, precision=precision))

    @torch.no_grad()
    def __call__(self, batch: PackedBatch) -> PackedBatch:
        raw = batch.raw
        if raw is None:
            return batch
        latents_TC, conditions = batch.latents_TC, batch.conditions
        if raw.pixels is not None:
            latents = self._latents(batch, raw.pixels)
            latents_TC = batch.layout.insert_padding(patchify_all(latents, *self.spec.patch))
            conditions |= self._derived(batch, latents)
        if raw.captions is not None:
            conditions |= self._texts(batch, raw.captions)
        return replace(batch, latents_TC=latents_TC, conditions=conditions, raw=None)

    def _derived(self, batch: PackedBatch, latents: Sequence[Tensor]) -> Conditions:
        per_token = [c for c in self.spec.conditions if c.is_per_token]
        derived = {c.name: list(map(c.derive, latents)) for c in per_token if c.derive is not None}
        return pack_conditions(self.spec.conditions, derived, batch.layout, self.spec.patch)

    def _latents(self, batch: PackedBatch, pixels: Sequence[Tensor]) -> list[Tensor]:
        """Return the latent of each sample `[C, T, H, W]`, float32."""
        vae = self.vae
        assert vae is not None

        def encode(indices: list[int]) -> list[Tensor]:
            stacked = to_device(torch.stack([pixels[i] for i in indices]), self.device)
            return [vae.encode(pixel_values(stacked))]

        shapes = [clip.shape[1:] for clip in pixels]
        batches = in_batches(shapes, lambda shape: MAX_BATCH_PIXELS // prod(shape))
        encoded = self._on_all_peers(batches, [[vae.geometry.latent_shape(*shape)] for shape in shapes], encode)
        return [  # an image is repeated to fill a patch in time
            latent.expand(-1, grid[0] * self.spec.patch_temporal, -1, -1)
            for (latent,), grid in zip(encoded, batch.grids)
        ]

    def _texts(self, batch: PackedBatch, captions: Sequence[str]) -> Conditions:
        unique = list(dict.fromkeys(captions))
        entries = join_entries(self.texts, [self._embed(encoder, unique) for encoder in self.texts])
        by_caption = {
            name: dict(zip(unique, values, strict=True))
            for name, values in texts_as_conditions(entries, self.spec.conditions, self.max_text_tokens).items()
        }
        texts = {name: [values[caption] for caption in captions] for name, values in by_caption.items()}
        return pack_conditions(self.spec.conditions, texts, batch.layout, self.spec.patch)

    def _embed(self, encoder: TextEncoder, texts: Sequence[str]) -> dict[str, list[Tensor]]:
        ids, makes, sizes = encoder.tokenize(texts), encoder.config.makes, encoder.geometry

        def encode(indices: list[int]) -> list[Tensor]:
            entries = encoder.forward([ids[i] for i in indices])
            return [entries[entry] for entry in makes]

        shapes = [
            [(sizes.pooled or 0,) if entry == "pooled" else (encoder.rows(numbers), sizes.width) for entry in makes]
            for numbers in ids
        ]
        encoded = self._on_all_peers(encoder.batches(ids), shapes, encode)
        return {entry: [rows[place] for rows in encoded] for place, entry in enumerate(makes)}

    def _on_all_peers(
        self,
        batches: Sequence[list[int]],
        shapes: Sequence[Sequence[Sequence[int]]],
        encode: Callable[[list[int]], Sequence[Tensor]],
    ) -> list[list[Tensor]]:
        """Distribute the batches over the peers, encode them, and gather the results of each item, float32.

        Args:
            batches: indices of items; they depend only on the pack, not on the number of peers.
            shapes: of each result of each item.
            encode: returns each result for the items of a batch, `[B, ...]`.
        """
        flat = torch.zeros(sum(prod(shape) for results in shapes for shape in results), device=self.device)
        unassigned, parts = flat, list[list[Tensor]]()
        for results in shapes:
            parts.append([])
            for shape in results:
                parts[-1].append(unassigned[: prod(shape)].view(*shape))
                unassigned = unassigned[prod(shape) :]
        count, rank = (1, 0) if self.peers is None else (self.peers.size(), self.peers.rank())
        for number, indices in enumerate(batches):
            if number % count != rank:
                continue
            for place, values in enumerate(encode(indices)):
                for i, value in zip(indices, values, strict=True):
                    parts[i][place].copy_(value)
        if count > 1:
            dist.all_reduce(flat, group=self.peers)  # exact: one peer has the value, the others add zeros
        return parts
