"""Frozen text encoders of transformers, for captions of data sets and prompts of samples.

    caption -- prompt, tokenizer, truncation --> ids -- batches of one length --> tokens [K, width], pooled [width]

Batches contain texts of one length, so they have no padding. The result for T5 and BERT is that of a padded batch with
an attention mask, the result for causal networks that of a padded batch. CLIP's pooled vector is the output at the end
token, after the projection if the weights have one. That of a sentence encoder is the normalized mean of its tokens.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from dit.conditions import Condition
from dit.encoders.pictures import PictureReader
from dit.encoders.pretrained import load_network, load_tokenizer
from dit.encoders.text_config import (
    CLASSES,
    ENCODERS,
    LANGUAGE_MODELS,
    TextEncoderConfig,
    as_conditions,
    check_text_encoder,
    config_of,
    encoder_config,
    source_of,
)
from dit.encoders.vae import DTYPES, Precision, in_batches
from dit.errors import ConfigError
from dit.kernels.attention import without_cudnn
from dit.safe_files import read_bytes
from dit.terminal import counted

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BATCH_TOKENS = 4096
END = 256
"""Token of the identity encoder that follows the bytes of a text."""

logger = logging.getLogger(__name__)


class TextEncoder:
    """A frozen pretrained encoder; `precision` is that of weights and activations, embeddings are always float32."""

    def __init__(self, config: TextEncoderConfig, *, device: str = "cpu", precision: Precision = "fp32") -> None:
        self.config, self.geometry, self.device = config, config.geometry(), device
        self._tokenizer: Any = None
        self._model: Any = None
        self._pictures: Optional[PictureReader] = None
        self._dropped = slice(0, 0)
        if self.geometry.kind == "identity":
            return
        _check_weights(config.name)
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        kind = self.geometry.kind
        source = _near(config.name, "tokenizer", "tokenizer_config.json")
        self._tokenizer = load_tokenizer(f"the tokenizer of text encoder {config.name!r}", **source)
        self._dropped = config.around.dropped(len(self._tokenizer(config.around.before)["input_ids"]))
        options = {**source_of(config.name), **options_of(kind, config_of(config.name)), "dtype": DTYPES[precision]}
        self._model = load_network(class_of(kind), f"text encoder {config.name!r}", **options).to(device)
        if config.around.picture:
            source = _near(config.name, "processor", "preprocessor_config.json")
            mark = self._model.config.image_token_id
            self._pictures = PictureReader(f"text encoder {config.name!r}", source, mark)

    def of_negatives(self) -> "TextEncoder":
        """Return this encoder for negative prompts, with the same network."""
        encoder, name = copy(self), self.config.around.negative
        if name is not None:
            encoder.config, encoder._dropped = replace(self.config, prompt=name), slice(0, 0)
        return encoder

    def tokenize(self, texts: Sequence[str], *, pictures: Optional[Sequence[int]] = None) -> list[list[int]]:
        """Return the token ids of each text, with those of the prompt and start and end tokens, without padding.

        A text whose embedding has more than `max_tokens` rows is truncated before its end token, with a warning.
        `pictures` is the number of pictures of each text; each picture is one token.
        """
        max_tokens, around = self.geometry.max_tokens, self.config.around
        if self._tokenizer is None:
            return [[*text.encode()[: max_tokens - 1], END] for text in texts]
        try:
            counts = [0] * len(texts) if pictures is None else pictures
            rendered = [around.render(text, self._tokenizer, pictures=n) for text, n in zip(texts, counts, strict=True)]
        except ValueError as error:
            raise ConfigError(f"text encoder {self.config.name!r}: {error}") from error
        start = self._tokenizer.bos_token if around.chat else None
        options = {"add_special_tokens": not (start and rendered[0].startswith(start))}  # a template may have it
        ids: list[list[int]] = self._tokenizer(rendered, verbose=False, **options)["input_ids"]
        limit = max_tokens + self._dropped.stop - self._dropped.start
        long = [i for i, numbers in enumerate(ids) if len(numbers) > limit]
        if long:
            logger.warning(
                "%s, truncated to the %d tokens of %s: the first has %d tokens and begins with %r",
                *(counted(len(long), "long text"), max_tokens, self.config.name),
                *(len(ids[long[0]]), texts[long[0]][:60]),
            )
            ids = self._tokenizer(rendered, truncation=True, max_length=limit, **options)["input_ids"]
        return [numbers if text or not around.may_be_empty else [] for numbers, text in zip(ids, rendered, strict=True)]

    def rows(self, ids: Sequence[int]) -> int:
        """Return the length of the embedding of a text."""
        if self.config.padded or self.config.zero_padded:
            return self.geometry.max_tokens
        rows = len(ids) - len(range(len(ids))[self._dropped])
        return min(rows + self.config.padded_once, self.geometry.max_tokens)

    @torch.no_grad()
    @without_cudnn()
    def forward(self, ids: Sequence[Sequence[int]], pictures: Sequence["Image"] = ()) -> dict[str, Tensor]:
        """Embed texts of one length, or of any lengths if they are padded; `pictures` belong to the only text.

        Returns:
            Embeddings by entry, float32 on the encoder's device: tokens `[B, K, width]`, pooled vectors `[B, width]`.
        """
        tokens, pooled = self._embed(ids, pictures)
        tokens = torch.cat([tokens[:, : self._dropped.start], tokens[:, self._dropped.stop :]], 1)
        if self.config.zero_padded:
            tokens = torch.nn.functional.pad(tokens, (0, 0, 0, self.geometry.max_tokens - tokens.shape[1]))
        entries = {entry: pooled if entry == "pooled" else tokens for entry in self.config.makes}
        return {entry: values.float() for entry, values in entries.items() if values is not None}

    def _embed(self, ids: Sequence[Sequence[int]], pictures: Sequence["Image"]) -> tuple[Tensor, Optional[Tensor]]:
        kind, layers = self.geometry.kind, self.config.layers
        if not (ids[0] or self.config.padded or self.config.padded_once):
            return torch.zeros(len(ids), 0, self.geometry.width, device=self.device), None
        if kind == "identity":
            return torch.nn.functional.one_hot(torch.tensor(ids, device=self.device), self.geometry.width), None
        if pictures and self._pictures is not None:
            values = self._pictures(ids[0], pictures, self.config.around.picture_area)
            inputs = {name: value.to(self.device) for name, value in values.items()}
        elif self.config.padded or self.config.padded_once:
            inputs = self._padded(ids)
        else:
            inputs = {"input_ids": torch.tensor(ids, device=self.device)}
        options = {"use_cache": False} if kind in LANGUAGE_MODELS else {}
        out = self._model(**inputs, **options, output_hidden_states=bool(layers))
        tokens = torch.cat([out.hidden_states[i] for i in layers], -1) if layers else out.last_hidden_state
        if kind == "sentence":
            mask_BK = inputs.get("attention_mask")
            total = tokens.sum(1) if mask_BK is None else (tokens * mask_BK[..., None]).sum(1)
            return tokens, torch.nn.functional.normalize(total, dim=-1)  # direction of the mean
        if kind == "clip_projected":
            return tokens, out.text_embeds
        return tokens, out.pooler_output if kind == "clip" else None

    def _padded(self, ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return token ids with padding on the side of the tokenizer, and a mask unless the encoder attends to it."""
        length = self.geometry.max_tokens + self._dropped.stop - self._dropped.start
        length = min(len(ids[0]) + 1, length) if self.config.padded_once else length
        is_masked = self.config.padded_once or self.geometry.kind in (*LANGUAGE_MODELS, "sentence")
        options = {"return_attention_mask": is_masked, "return_tensors": "pt", "verbose": False}
        rows = {"input_ids": list(map(list, ids))}
        return dict(self._tokenizer.pad(rows, padding="max_length", max_length=length, **options).to(self.device))

    def save(self, root: Path, part: str, *, cut: bool) -> dict[str, str]:
        """Write network, tokenizer and processor of pictures as parts of a pipeline; return their classes by folder.

        Args:
            cut: store `max_tokens` in the tokenizer, as the length to which it pads and truncates.
        """
        if cut:
            self._tokenizer.model_max_length = self.geometry.max_tokens
        state, size = dict(self._model.state_dict()), self._model.config.get_text_config().hidden_size
        if self.geometry.kind == "sentence":  # the pooling layer is not loaded, because its output is not used
            state |= {"pooler.dense.weight": torch.zeros(size, size), "pooler.dense.bias": torch.zeros(size)}
        self._model.save_pretrained(root / part, state_dict=state)
        if self.geometry.kind == "t5gemma":  # diffusers reads a configuration of encoder and decoder
            from transformers import T5GemmaConfig

            own = self._model.config.to_dict()
            T5GemmaConfig(encoder=own, decoder=own).save_pretrained(root / part)
        tokenizer = part.replace("text_encoder", "tokenizer")
        self._tokenizer.save_pretrained(root / tokenizer)
        classes = {part: type(self._model).__name__, tokenizer: type(self._tokenizer).__name__}
        if self._pictures is not None:
            classes["processor"] = self._pictures.save(root / "processor", self._tokenizer)
        return classes

    def batches(self, ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Group token ids of equal length (after padding) into batches for `forward`; return the indices."""
        lengths = [self.geometry.max_tokens if self.config.padded else len(numbers) for numbers in ids]
        return in_batches(lengths, lambda length: MAX_BATCH_TOKENS // max(1, length))

    def encode(
        self, texts: Sequence[str], pictures: Optional[Sequence[Sequence["Image"]]] = None
    ) -> dict[str, list[Tensor]]:
        """Embed texts; equal texts are computed once. An embedding does not depend on the other texts.

        Args:
            pictures: of each text, for encoders that read them; None for texts without pictures.

        Returns:
            Values of each text by entry, float32: tokens `[K, width]`, start and end included, or vectors `[width]`.
        """
        if self._pictures is not None and pictures is not None:
            ids = self.tokenize(texts, pictures=list(map(len, pictures)))
            by_text = [self.forward([ids[i]], several) for i, several in enumerate(pictures)]
            return {entry: [entries[entry][0] for entries in by_text] for entry in self.config.makes}
        unique = list(dict.fromkeys(texts))
        ids = self.tokenize(unique)
        embedded: dict[str, dict[str, Tensor]] = {entry: {} for entry in self.config.makes}
        for batch in self.batches(ids):
            for entry, rows in self.forward([ids[i] for i in batch]).items():
                embedded[entry].update(zip((unique[i] for i in batch), rows.unbind(0), strict=True))
        return {entry: [values[text].clone() for text in texts] for entry, values in embedded.items()}


def _check_weights(name: str) -> None:
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

    if kind == "t5gemma":  # without its decoder
        from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

        return T5GemmaEncoder
    return getattr(transformers, CLASSES[kind])


def options_of(kind: str, config: Any) -> dict[str, Any]:
    """Return constructor arguments for a kind of network, in addition to its own configuration."""
    if kind == "t5gemma":
        return {"config": encoder_config(config)}
    return {"add_pooling_layer": False} if kind == "sentence" else {}  # the mean of the tokens is used instead


def _near(name: str, part: str, file: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a part of an encoder, such as its tokenizer.

    It is next to the weights, or in a pipeline of diffusers in its own folder: `tokenizer_2` for `text_encoder_2`.
    """
    source = source_of(name)
    key = "subfolder" if "subfolder" in source else "pretrained_model_name_or_path"
    folder = Path(source[key])
    if folder.name.startswith("text_encoder") and not (folder / file).is_file():
        source[key] = folder.with_name(folder.name.replace("text_encoder", part, 1)).as_posix()
    return source


class TextEncoders:
    """The encoders of one line, see `dit.encoders.text_config`."""

    def __init__(self, line: str, device: str = "cpu", *, precision: Precision = "fp32") -> None:
        configs = check_text_encoder(line).encoders
        self.encoders = [TextEncoder(config, device=device, precision=precision) for config in configs]

    def encode(
        self, texts: Sequence[str], pictures: Optional[Sequence[Sequence["Image"]]] = None, *, negative: bool = False
    ) -> dict[str, list[Tensor]]:
        """Embed texts, or negative prompts, by every encoder, as `TextEncoder.encode`."""
        encoders = [encoder.of_negatives() if negative else encoder for encoder in self.encoders]
        return join_entries(encoders, [encoder.encode(texts, pictures) for encoder in encoders])


def join_entries(
    encoders: Sequence[TextEncoder], embeddings: Sequence[Mapping[str, list[Tensor]]]
) -> dict[str, list[Tensor]]:
    """Merge the embeddings of the encoders of a line; concatenate the features of joined tokens."""
    entries: dict[str, list[Tensor]] = {}
    for encoder, new_entries in zip(encoders, embeddings, strict=True):
        for entry, rows in new_entries.items():
            if entry in entries:
                axis = -2 if encoder.config.appended else -1
                rows = [torch.cat(_of_one_width(pair, axis), axis) for pair in zip(entries[entry], rows, strict=True)]
            entries[entry] = rows
    return entries


def texts_as_conditions(
    entries: Mapping[str, list[Tensor]], conditions: Sequence[Condition], max_tokens: Optional[int]
) -> dict[str, list[Tensor]]:
    """Rename embeddings to the conditions of a model, with tokens truncated to `data.max_text_tokens`."""
    texts = {condition.name for condition in conditions if condition.axis == "text"}
    values = as_conditions(entries, conditions)
    return {name: [row[:max_tokens] if name in texts else row for row in rows] for name, rows in values.items()}


def _of_one_width(tensors: Sequence[Tensor], axis: int) -> list[Tensor]:
    """Return tensors to concatenate along an axis: for tokens, with zeros up to the width of the widest."""
    width = max(x.shape[-1] for x in tensors) if axis == -2 else 0
    return [torch.nn.functional.pad(x, (0, max(0, width - x.shape[-1]))) for x in tensors]


@lru_cache(maxsize=1)
def load_text_encoders(line: str, device: str = "cpu", precision: Precision = "fp32") -> TextEncoders:
    """Return cached encoders, for commands that encode more than once."""
    return TextEncoders(line, device=device, precision=precision)


def empty_texts(
    line: Optional[str],
    conditions: Sequence[Condition],
    device: torch.device,
    load: Callable[[str, str], TextEncoders] = TextEncoders,
) -> dict[str, Tensor]:
    """Embed the empty text for conditions that have it as null, `[k, D]` by name.

    Args:
        line: text encoders of the model; None if they are unknown.
        load: returns the encoders of a line on a device; `load_text_encoders` caches them.
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
