"""From the decoded parts of a sample to a `Clip`.

Parts a sample may have: `latent.npy` or `latent.safetensors` (`[C, T, H, W]`, or `[C, H, W]` for an image), `text.npy`
or `text.safetensors` (text embeddings `[K, context_size]`), `pooled.npy` or `pooled.safetensors` (pooled text embedding
`[pooled_size]`). Metadata that is used: `label`, `fps` (or `framerate`), `loss_weight`, `aesthetic_score`.
"""

from typing import Any, Optional

import numpy as np
import torch
from megatron.energon import Cooker, stateless
from torch import Tensor

from dit.data_api import sample_id
from dit.errors import page_of
from energon_data.samples import LATENT, META_PART, POOLED, TEXT, Clip, SampleError, finite_number

FPS_RANGE = (1e-3, 1e6)
"""Frame rates that a sample may state, per second: wide, but far from where float32 becomes 0 or infinite."""
LOSS_WEIGHT_RANGE = (0.0, 1e3)
"""Weights that a sample may state: none turns its loss around, none outweighs all others."""


def _tensor(sample: dict[str, Any], stem: str) -> Optional[Tensor]:
    """Return the floating-point tensor of a part, from either of its formats."""
    value = sample.get(f"{stem}.npy")
    tensors = sample.get(f"{stem}.safetensors")
    if value is not None:
        tensor = _from_numpy(value, stem)
    elif tensors is None:
        return None
    elif stem in tensors:
        tensor = tensors[stem]
    elif len(tensors) == 1:
        tensor = next(iter(tensors.values()))
    else:
        raise SampleError("wrong_part", f"{stem}.safetensors holds {sorted(tensors)}, none is called {stem!r}")
    if not tensor.is_floating_point():
        raise SampleError("wrong_part", f"the {stem} holds {tensor.dtype}; store a real floating-point type")
    return tensor


def _from_numpy(value: np.ndarray, stem: str) -> Tensor:
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError) as error:  # ValueError: another byte order than this machine's
        raise SampleError("wrong_part", f"{stem}.npy holds {value.dtype}, which is no number type of torch") from error


def _number(metadata: dict[str, Any], names: tuple[str, ...], limits: tuple[float, float]) -> Optional[float]:
    """Return the first of some entries that is there.

    Raises:
        SampleError: it is no number between the limits.
    """
    for name in names:
        if metadata.get(name) is not None:
            value = finite_number(metadata, name)
            if not limits[0] <= value <= limits[1]:
                raise SampleError("metadata", f"{name} is {value:g}, sound are {limits[0]:g} to {limits[1]:g}")
            return value
    return None


def _label(metadata: dict[str, Any]) -> Optional[int]:
    """Return the class; what range the model knows is checked with the model.

    Raises:
        SampleError: it is no whole number.
    """
    if metadata.get("label") is None:
        return None
    value = finite_number(metadata, "label")
    if not value.is_integer():
        raise SampleError("metadata", f"label is {value:g}, not a whole number; classes count from 0")
    return int(value)


@stateless
def cook_clip(sample: dict[str, Any]) -> Clip:
    """Take latent, text and metadata out of the decoded parts.

    Raises:
        SampleError: there is no latent, a part has the wrong rank or type, or metadata are out of range.
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
    weight = _number(metadata, ("loss_weight",), LOSS_WEIGHT_RANGE)
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
        label=_label(metadata),
        fps=_number(metadata, ("fps", "framerate"), FPS_RANGE),
        loss_weight=1.0 if weight is None else weight,
    )


COOKERS = (Cooker(cook_clip),)
