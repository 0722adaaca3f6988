"""Frozen text encoders of transformers, for captions of data sets and for prompts of samples.

    text -- tokenizer, cut --> ids -- those of one length together --> tokens [K, width], pooled vector [width]

Texts of one length share a batch, so there is no padding: T5 and BERT see a text as under an attention mask, and CLIP,
which is causal, as in a padded batch. The pooled vector is CLIP's at the end mark, after its projection where the
weights have one; that of a sentence encoder is the mean of its tokens, of length 1.
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
"""Of the identity encoder, the token behind the bytes of a text."""

logger = logging.getLogger(__name__)


class TextEncoder:
    """A pretrained encoder, frozen.

    Args:
        config: which, and what it makes.
        device: where it runs.
        precision: of its weights and activations; what it makes is float32 either way.

    Attributes:
        geometry: sizes of what it makes.
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
        """Return the token numbers of each text, the marks of beginning and end included.

        A text of more than `max_tokens` loses its last words, but not its end mark, and a warning is logged.
        """
        most = self.geometry.max_tokens
        if self._tokenizer is None:
            return [[*text.encode()[: most - 1], END] for text in texts]
        ids: list[list[int]] = self._tokenizer(list(texts))["input_ids"]
        cut = [i for i, numbers in enumerate(ids) if len(numbers) > most]
        if cut:
            logger.warning(
                "%d texts are longer than the %d tokens of %s and lose their end, such as %.60r of %d",
                *(len(cut), most, self.config.name, texts[cut[0]], len(ids[cut[0]])),
            )
        if cut or self.config.padded:
            padding = "max_length" if self.config.padded else False
            return self._tokenizer(list(texts), truncation=True, max_length=most, padding=padding)["input_ids"]
        return ids

    @torch.no_grad()
    def forward(self, ids_BK: Tensor) -> dict[str, Tensor]:
        """Embed texts of one length.

        Returns:
            What is made by entry, float32 on the encoder's device: tokens `[B, K, width]`, pooled vectors `[B, width]`.
        """
        tokens, pooled = self._embed(ids_BK.to(self.device))
        if self.config.zero_padded:
            tokens = torch.nn.functional.pad(tokens, (0, 0, 0, self.geometry.max_tokens - tokens.shape[1]))
        made = {entry: pooled if entry == "pooled" else tokens for entry in self.config.makes}
        return {entry: values.float() for entry, values in made.items() if values is not None}

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
            cut: the tokenizer pads and cuts to `max_tokens` by itself.
        """
        if cut:
            self._tokenizer.model_max_length = self.geometry.max_tokens
        state, size = dict(self._model.state_dict()), self.geometry.width
        if self.geometry.kind == "sentence":  # the pooling layer that is not loaded: no reader uses its output
            state |= {"pooler.dense.weight": torch.zeros(size, size), "pooler.dense.bias": torch.zeros(size)}
        self._model.save_pretrained(encoder, state_dict=state)
        self._tokenizer.save_pretrained(tokenizer)
        return type(self._model).__name__, type(self._tokenizer).__name__

    def batches(self, ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Group token numbers by their length, so that one group is one call of `forward`; return the indices."""
        return in_batches([len(numbers) for numbers in ids], lambda length: MAX_BATCH_TOKENS // length)

    def encode(self, texts: Sequence[str]) -> dict[str, list[Tensor]]:
        """Embed texts; equal texts are computed once. An embedding does not depend on the other texts.

        Returns:
            For each entry the values of each text, float32 on the encoder's device: tokens `[K, width]`, the marks of
            beginning and end included, or a pooled vector `[width]`.
        """
        unique = list(dict.fromkeys(texts))
        ids = self.tokenize(unique)
        embedded: dict[str, dict[str, Tensor]] = {entry: {} for entry in self.config.makes}
        for batch in self.batches(ids):
            for entry, rows in self.forward(torch.tensor([ids[i] for i in batch])).items():
                embedded[entry].update(zip((unique[i] for i in batch), rows.unbind(0), strict=True))
        return {entry: [values[text].clone() for text in texts] for entry, values in embedded.items()}


def _check_weights(name: str) -> None:
    """Compare the weights of a packaged encoder with those that its name stands for."""
    if name not in ENCODERS:
        return
    folder, expected = ENCODERS[name].folder, ENCODERS[name].sha256
    found = hashlib.sha256(read_bytes(folder / "model.safetensors", 1 << 30)).hexdigest()
    if found != expected:
        raise ConfigError(
            f"the weights of text encoder {name!r} in {folder} have SHA-256 {found[:12]}, not {expected[:12]}; "
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
    """Return what the class of a kind of network takes besides its configuration."""
    return {"add_pooling_layer": False} if kind == "sentence" else {}  # the mean of the tokens is taken instead


def _load_tokenizer(name: str) -> Any:
    """Load the tokenizer beside the weights, or that of a pipeline of diffusers: `text_encoder_2` has `tokenizer_2`."""
    from transformers import AutoTokenizer

    source = source_of(name)
    key = "subfolder" if "subfolder" in source else "pretrained_model_name_or_path"
    folder = Path(source[key])
    if folder.name.startswith("text_encoder") and not (folder / "tokenizer_config.json").is_file():
        source[key] = folder.with_name(folder.name.replace("text_encoder", "tokenizer", 1)).as_posix()
    return load_without_code(AutoTokenizer, f"the tokenizer of text encoder {name!r}", **source)


class TextEncoders:
    """The encoders of one line, which together make the entries of a text.

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
    encoders: Sequence[TextEncoder], made: Sequence[Mapping[str, list[Tensor]]]
) -> dict[str, list[Tensor]]:
    """Return what the encoders of a line made, by entry; the tokens of joined ones side by side.

    Args:
        made: by each encoder, the values of each text by entry.
    """
    entries: dict[str, list[Tensor]] = {}
    for encoder, own in zip(encoders, made, strict=True):
        beside = {"text"} if encoder.config.joined else set()
        entries |= {
            entry: [torch.cat(pair, -1) for pair in zip(entries[entry], rows, strict=True)] if entry in beside else rows
            for entry, rows in own.items()
        }
    return entries


@lru_cache(maxsize=1)
def load_text_encoders(line: str, device: str = "cpu", precision: Precision = "fp32") -> TextEncoders:
    """Return encoders that stay in memory, for commands that encode more than once."""
    return TextEncoders(line, device=device, precision=precision)


def empty_texts(
    line: Optional[str],
    wanted: Sequence[Condition],
    device: torch.device,
    load: Callable[[str, str], TextEncoders] = TextEncoders.on,
) -> dict[str, Tensor]:
    """Embed the empty text for the conditions whose null it is.

    Args:
        line: the encoders that the model is trained on; None if they are not known.
        wanted: conditions of the model.
        load: returns the encoders of a line on a device; `load_text_encoders` keeps them in memory.

    Returns:
        `[k, D]` by name of the condition.

    Raises:
        ConfigError: the encoders are not known, or make no such text.
    """
    names = [condition.name for condition in wanted if condition.null == "empty text"]
    if not names:
        return {}
    if line is None:
        raise ConfigError(
            "the model replaces a dropped text by the embedding of the empty text, and the encoder is not known; "
            "prepare the data, or import the weights, with --text-encoder"
        )
    made = as_conditions(load(line, str(device)).encode([""]), wanted)
    if missing := sorted(set(names) - set(made)):
        raise ConfigError(f"text encoder {line!r} makes no {', '.join(missing)}, which the model reads")
    return {name: made[name][0] for name in names}
