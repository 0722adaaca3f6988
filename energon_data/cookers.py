"""From the decoded parts of a sample to a `Clip`.

Parts a sample may have: `latent.npy` or `latent.safetensors` (`[C, T, H, W]`, or `[C, H, W]` for an image), `text.npy`
or `text.safetensors` (text embeddings `[K, context_size]`), `pooled.npy` or `pooled.safetensors` (pooled text embedding
`[pooled_size]`). Metadata that is used: `label`, `fps` (or `framerate`), `loss_weight`, `aesthetic_score`.
"""

import math
from typing import Any, Optional

import numpy as np
import torch
from megatron.energon import Cooker, stateless
from torch import Tensor

from dit.data_api import sample_id
from dit.errors import page_of
from energon_data.samples import LATENT, META_PART, POOLED, TEXT, Clip, SampleError


def _tensor(sample: dict[str, Any], stem: str) -> Optional[Tensor]:
    """Return the tensor of a part, from either of its formats."""
    value = sample.get(f"{stem}.npy")
    if value is not None:
        return _from_numpy(value, stem)
    tensors = sample.get(f"{stem}.safetensors")
    if tensors is None:
        return None
    if stem in tensors:
        return tensors[stem]
    if len(tensors) == 1:
        return next(iter(tensors.values()))
    raise SampleError("wrong_part", f"{stem}.safetensors holds {sorted(tensors)}, none is called {stem!r}")


def _from_numpy(value: np.ndarray, stem: str) -> Tensor:
    try:
        return torch.from_numpy(value)
    except TypeError as error:
        raise SampleError("wrong_part", f"{stem}.npy holds {value.dtype}, which is no number type of torch") from error


def _number(metadata: dict[str, Any], *names: str) -> Optional[float]:
    for name in names:
        value = metadata.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise SampleError("bad_json", f"{name} is {value!r}, not a number")
            return float(value)
    return None


@stateless
def cook_clip(sample: dict[str, Any]) -> Clip:
    """Take latent, text and metadata out of the decoded parts.

    Raises:
        SampleError: there is no latent, or a part has the wrong rank or type.
    """
    metadata = sample[META_PART]
    latent = _tensor(sample, LATENT)
    if latent is None:
        raise SampleError(
            "missing_part",
            "the sample has no latent.npy or latent.safetensors; pictures and videos must be encoded beforehand "
            f"({page_of('energon_data')})",
        )
    if latent.dim() == 3:
        latent = latent[:, None]
    if latent.dim() != 4 or 0 in latent.shape:
        raise SampleError("wrong_shape", f"the latent has shape {list(latent.shape)}, wanted [C, T, H, W]")
    text = _tensor(sample, TEXT)
    if text is not None and (text.dim() != 2 or 0 in text.shape):
        raise SampleError("wrong_shape", f"the text has shape {list(text.shape)}, wanted [tokens, width]")
    pooled = _tensor(sample, POOLED)
    if pooled is not None and (pooled.dim() != 1 or 0 in pooled.shape):
        raise SampleError("wrong_shape", f"the pooled text has shape {list(pooled.shape)}, wanted [width]")
    label = _number(metadata, "label")
    weight = _number(metadata, "loss_weight")
    fps = _number(metadata, "fps", "framerate")
    if fps is not None and not 0 < fps < math.inf:
        raise SampleError("bad_json", f"fps is {fps:g}, not a number greater than 0")
    key = sample["__key__"]
    return Clip(
        __key__=key,
        __restore_key__=sample["__restore_key__"],
        __sources__=sample["__sources__"],
        latent=latent.float(),
        metadata=metadata,
        text=text,
        pooled=None if pooled is None else pooled.float(),
        shard=sample["__shard__"],
        id=sample_id(key),
        label=None if label is None else int(label),
        fps=fps,
        loss_weight=1.0 if weight is None else weight,
    )


COOKERS = (Cooker(cook_clip),)
