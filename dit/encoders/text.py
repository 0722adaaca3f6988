"""Frozen text encoders of transformers, for captions of data sets and prompts of samples.

    text -- tokenizer, truncation --> ids -- batches of one length --> tokens [K, width], pooled vector [width]

Batches contain texts of one length, so they have no padding. The result for T5 and BERT is that of a padded batch with
an attention mask, the result for the causal CLIP that of a padded batch. CLIP's pooled vector is the output at the end
token, after the projection if the weights have one. That of a sentence encoder is the normalized mean of its tokens.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from dit.conditions import Condition
from dit.encoders.batching import in_batches
from dit.encoders.pretrained import load_network, load_without_code
from dit.encoders.text_config import ENCODERS, TextEncoderConfig, as_conditions, check_text_encoder, source_of
from dit.encoders.vae import DTYPES, Precision
from dit.errors import ConfigError
from dit.safe_files import read_bytes

MAX_BATCH_TOKENS = 4096
END = 256
"""Token of the identity encoder that follows the bytes of a text."""

logger = logging.getLogger(__name__)


class TextEncoder:
    """A frozen pretrained encoder.

    Args:
        config: name and entries of the encoder.
        device: of the weights.
        precision: of weights and activations; embeddings are always float32.

    Attributes:
        geometry: sizes of the embeddings.
    """

    def __init__(self, config: TextEncoderConfig, *, device: str = "cpu", precision: Precision = "fp32") -> None:
        self.config, self.geometry, self.device = config, config.geometry(), device
        self._tokenizer: Any = None
        self._model: Any = None
        if self.geometry.kind == "identity":
            return
        _check_weights(config.name)
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        kind = self.geometry.kind
        self._tokenizer = _load_tokenizer(config.name)
        options = {**source_of(config.name), **options_of(kind), "dtype": DTYPES[precision]}
        self._model = load_network(class_of(kind), f"text encoder {config.name!r}", **options).to(device)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, start and end tokens included.

        A text of more than `max_tokens` is truncated before its end token, with a warning.
        """
        max_tokens = self.geometry.max_tokens
        if self._tokenizer is None:
            return [[*text.encode()[: max_tokens - 1], END] for text in texts]
        ids: list[list[int]] = self._tokenizer(list(texts))["input_ids"]
        long = [i for i, numbers in enumerate(ids) if len(numbers) > max_tokens]
        if long:
            logger.warning(
                "%d texts are truncated to the %d tokens of %s, such as %.60r of %d tokens",
                *(len(long), max_tokens, self.config.name, texts[long[0]], len(ids[long[0]])),
            )
        if long or self.config.padded:
            padding = "max_length" if self.config.padded else False
            return self._tokenizer(list(texts), truncation=True, max_length=max_tokens, padding=padding)["input_ids"]
        return ids

    @torch.no_grad()
    def forward(self, ids_BK: Tensor) -> dict[str, Tensor]:
        """Embed texts of one length.

        Returns:
            Embeddings by entry, float32 on the encoder's device: tokens `[B, K, width]`, pooled vectors `[B, width]`.
        """
        tokens, pooled = self._embed(ids_BK.to(self.device))
        if self.config.zero_padded:
            tokens = torch.nn.functional.pad(tokens, (0, 0, 0, self.geometry.max_tokens - tokens.shape[1]))
        entries = {entry: pooled if entry == "pooled" else tokens for entry in self.config.makes}
        return {entry: values.float() for entry, values in entries.items() if values is not None}

    def _embed(self, ids_BK: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        kind, penultimate = self.geometry.kind, self.config.layer == "penultimate"
        if kind == "identity":
            return torch.nn.functional.one_hot(ids_BK, self.geometry.width), None
        out = self._model(input_ids=ids_BK, output_hidden_states=penultimate)
        tokens = out.hidden_states[-2] if penultimate else out.last_hidden_state
        if kind == "sentence":
            return tokens, torch.nn.functional.normalize(tokens.mean(1), dim=-1)
        if kind == "clip_projected":
            return tokens, out.text_embeds
        return tokens, out.pooler_output if kind == "clip" else None

    def save(self, encoder: Path, tokenizer: Path, *, cut: bool) -> tuple[str, str]:
        """Write network and tokenizer in transformers' layout; return their classes.

        Args:
            cut: store `max_tokens` in the tokenizer, as the length to which it pads and truncates.
        """
        if cut:
            self._tokenizer.model_max_length = self.geometry.max_tokens
        state, size = dict(self._model.state_dict()), self.geometry.width
        if self.geometry.kind == "sentence":  # the pooling layer is not loaded, because its output is not used
            state |= {"pooler.dense.weight": torch.zeros(size, size), "pooler.dense.bias": torch.zeros(size)}
        self._model.save_pretrained(encoder, state_dict=state)
        self._tokenizer.save_pretrained(tokenizer)
        return type(self._model).__name__, type(self._tokenizer).__name__

    def batches(self, ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Group token ids of equal length into batches for `forward`; return the indices."""
        return in_batches([len(numbers) for numbers in ids], lambda length: MAX_BATCH_TOKENS // length)

    def encode(self, texts: Sequence[str]) -> dict[str, list[Tensor]]:
        """Embed texts; equal texts are computed once. An embedding does not depend on the other texts.

        Returns:
            For each entry the values of each text, float32 on the encoder's device: tokens `[K, width]`, start and end
            tokens included, or a pooled vector `[width]`.
        """
        unique = list(dict.fromkeys(texts))
        ids = self.tokenize(unique)
        embedded: dict[str, dict[str, Tensor]] = {entry: {} for entry in self.config.makes}
        for batch in self.batches(ids):
            for entry, rows in self.forward(torch.tensor([ids[i] for i in batch])).items():
                embedded[entry].update(zip((unique[i] for i in batch), rows.unbind(0), strict=True))
        return {entry: [values[text].clone() for text in texts] for entry, values in embedded.items()}


def _check_weights(name: str) -> None:
    """Compare the weights of a packaged encoder with their SHA-256."""
    if name not in ENCODERS:
        return
    folder, expected = ENCODERS[name].folder, ENCODERS[name].sha256
    digest = hashlib.sha256(read_bytes(folder / "model.safetensors", 1 << 30)).hexdigest()
    if digest != expected:
        raise ConfigError(
            f"the weights of text encoder {name!r} in {folder} have SHA-256 {digest[:12]}, not {expected[:12]}; "
            "install the package again"
        )


def class_of(kind: str) -> Any:
    """Return the class of transformers that loads a kind of network."""
    import transformers

    names = {
        "sentence": "BertModel",
        "t5": "T5EncoderModel",
        "umt5": "UMT5EncoderModel",
        "clip": "CLIPTextModel",
        "clip_projected": "CLIPTextModelWithProjection",
    }
    return getattr(transformers, names[kind])


def options_of(kind: str) -> dict[str, Any]:
    """Return constructor arguments, in addition to the configuration, for a kind of network."""
    return {"add_pooling_layer": False} if kind == "sentence" else {}  # the mean of the tokens is used instead


def _load_tokenizer(name: str) -> Any:
    """Load the tokenizer next to the weights, or in a diffusers pipeline `tokenizer_2` for `text_encoder_2`."""
    from transformers import AutoTokenizer

    source = source_of(name)
    key = "subfolder" if "subfolder" in source else "pretrained_model_name_or_path"
    folder = Path(source[key])
    if folder.name.startswith("text_encoder") and not (folder / "tokenizer_config.json").is_file():
        source[key] = folder.with_name(folder.name.replace("text_encoder", "tokenizer", 1)).as_posix()
    return load_without_code(AutoTokenizer, f"the tokenizer of text encoder {name!r}", **source)


class TextEncoders:
    """The encoders of one line.

    Args:
        line: as in `dit.encoders.text_config`.
        device, precision: as in `TextEncoder`.
    """

    def __init__(self, line: str, *, device: str = "cpu", precision: Precision = "fp32") -> None:
        configs = check_text_encoder(line).encoders
        self.encoders = [TextEncoder(config, device=device, precision=precision) for config in configs]

    @classmethod
    def on(cls, line: str, device: str) -> "TextEncoders":
        """Load the encoders of a line on a device."""
        return cls(line, device=device)

    def encode(self, texts: Sequence[str]) -> dict[str, list[Tensor]]:
        """Embed texts by every encoder, as `TextEncoder.encode`."""
        return join_entries(self.encoders, [encoder.encode(texts) for encoder in self.encoders])


def join_entries(
    encoders: Sequence[TextEncoder], embeddings: Sequence[Mapping[str, list[Tensor]]]
) -> dict[str, list[Tensor]]:
    """Merge the embeddings of the encoders of a line; concatenate the features of joined tokens.

    Args:
        embeddings: of each encoder, the values of each text by entry.
    """
    entries: dict[str, list[Tensor]] = {}
    for encoder, new_entries in zip(encoders, embeddings, strict=True):
        for entry, rows in new_entries.items():
            if entry == "text" and encoder.config.joined:
                rows = [torch.cat(pair, -1) for pair in zip(entries[entry], rows, strict=True)]
            entries[entry] = rows
    return entries


@lru_cache(maxsize=1)
def load_text_encoders(line: str, device: str = "cpu", precision: Precision = "fp32") -> TextEncoders:
    """Return cached encoders, for commands that encode more than once."""
    return TextEncoders(line, device=device, precision=precision)


def empty_texts(
    line: Optional[str],
    conditions: Sequence[Condition],
    device: torch.device,
    load: Callable[[str, str], TextEncoders] = TextEncoders.on,
) -> dict[str, Tensor]:
    """Embed the empty text for conditions that have it as null.

    Args:
        line: text encoders of the model; None if they are unknown.
        conditions: of the model.
        load: returns the encoders of a line on a device; `load_text_encoders` caches them.

    Returns:
        `[k, D]` by name of the condition.

    Raises:
        ConfigError: the encoders are unknown, or do not make this text.
    """
    names = [condition.name for condition in conditions if condition.null == "empty text"]
    if not names:
        return {}
    if line is None:
        raise ConfigError(
            "the model replaces a dropped text by the embedding of the empty text, but its text encoder is unknown; "
            "prepare the data, or import the weights, with --text-encoder"
        )
    texts = as_conditions(load(line, str(device)).encode([""]), conditions)
    if absent := sorted(set(names) - set(texts)):
        raise ConfigError(f"text encoder {line!r} makes no {', '.join(absent)}, which the model reads")
    return {name: texts[name][0] for name in names}
