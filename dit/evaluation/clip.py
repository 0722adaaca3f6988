"""CLIP models of transformers: scores of pictures and their texts, and features of pictures.

Source: Radford et al. 2021, arXiv:2103.00020; the score, Hessel et al. 2021, arXiv:2104.08718, Eq. 1, with 100 in place
of its factor 2.5, as is usual for generated pictures.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dit.encoders.pretrained import load_network, load_tokenizer
from dit.errors import ConfigError
from dit.safe_files import parse_json, read_bytes


class ClipModel:
    """A pretrained CLIP, frozen."""

    def __init__(self, folder: str | Path, device: torch.device) -> None:
        try:
            from transformers import CLIPModel
        except ImportError as error:
            raise ConfigError("CLIP needs transformers, which is not installed: pip install '.[encoders]'") from error
        source = {"pretrained_model_name_or_path": folder, "local_files_only": True}
        try:
            model: Any = load_network(CLIPModel, "the network", **source)
            self._tokenizer: Any = load_tokenizer("the tokenizer", **source)
            self._pixels = parse_json(read_bytes(Path(folder) / "preprocessor_config.json"))
        except (ConfigError, OSError, ValueError) as error:
            raise ConfigError(
                f"no CLIP model at {folder}: {error}; give a local folder that transformers' save_pretrained wrote, "
                "with its tokenizer and preprocessor_config.json"
            ) from error
        self._model: Any = model.to(device)
        self.device = device
        self.width = int(model.config.projection_dim)

    def state_dict(self) -> Mapping[str, Tensor]:
        return self._model.state_dict()

    @torch.no_grad()
    def image_features(self, images: Tensor) -> Tensor:
        """Return the projected features `[N, D]` of pictures `[N, 3, H, W]` in [-1, 1], float32, not normalised."""
        pixels = self._prepare(images.to(self.device, torch.float32))
        return self._model.visual_projection(self._model.vision_model(pixel_values=pixels).pooler_output)

    @torch.no_grad()
    def text_features(self, texts: Sequence[str]) -> Tensor:
        """Return the projected features `[N, D]` of texts, float32, not normalised; long texts are truncated."""
        longest = self._model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt"
        ).to(self.device)
        output = self._model.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        return self._model.text_projection(output.pooler_output)

    def scores(self, images: Tensor, texts: Sequence[str]) -> Tensor:
        """Return 100 times the cosine of each picture with its text, at least 0, float32 `[N]` on the host."""
        cosine = functional.cosine_similarity(self.image_features(images), self.text_features(texts))
        return (100 * cosine).clamp(min=0).cpu()

    def _prepare(self, images: Tensor) -> Tensor:
        """Resize the shorter side, crop the centre and normalise, according to the preprocessor's settings."""
        settings = self._pixels
        crop = settings["crop_size"]
        height, width = (crop, crop) if isinstance(crop, int) else (crop["height"], crop["width"])
        size = settings["size"]
        shortest = size if isinstance(size, int) else size.get("shortest_edge", min(height, width))
        sides = [side * shortest // min(images.shape[2:]) for side in images.shape[2:]]
        if sides != list(images.shape[2:]):
            images = functional.interpolate(images, size=sides, mode="bicubic", antialias=True).clamp(-1, 1)
        top, left = (images.shape[2] - height) // 2, (images.shape[3] - width) // 2
        images = images[:, :, top : top + height, left : left + width]
        mean, std = (torch.tensor(settings[f"image_{name}"], device=images.device) for name in ("mean", "std"))
        return ((images + 1) / 2 - mean[:, None, None]) / std[:, None, None]
