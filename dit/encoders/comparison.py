"""Comparison of the encoders of data with those that a model was trained with."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Optional

from dit.conditions import Condition
from dit.data_api import DataConfig
from dit.encoders.text_config import TextEncoderConfig, parse_line
from dit.encoders.vae import Geometry, folder_of
from dit.errors import ConfigError, DataError


def compare_encoders(
    data: DataConfig,
    trained: tuple[Optional[str], Optional[str]],
    conditions: Sequence[Condition],
    weights: str,
    other_cure: str = "",
) -> list[str]:
    """Compare the encoders of data with those of a model's training data; unknown ones are not compared.

    Args:
        trained: names of autoencoder and text encoders of the training data; None if unknown.
        conditions: of the model; encoders of other texts are not compared.
        weights: origin of the model, for messages.
        other_cure: end of the messages.

    Returns:
        A line for each encoder that has another name, and the same sizes or sizes that cannot be read.

    Raises:
        ConfigError: an encoder has other sizes.
    """
    entries = {entry for condition in conditions for entry in condition.stored_as}

    def selected(line: str) -> list[TextEncoderConfig]:
        made = [(encoder.recorded(), entry) for encoder in parse_line(line) for entry in encoder.makes]
        return [replace(encoder, makes=(entry,)) for encoder, entry in made if entry in entries]

    def sizes(line: str) -> object:
        return [(encoder.makes, replace(encoder.geometry(), max_tokens=0)) for encoder in selected(line)]

    latents = "the latents", "autoencoder", "--vae", data.autoencoder, _resolved, Geometry.read
    texts = "the embedded texts", "text encoder", "--text-encoder", data.text_encoder, selected, sizes
    lines = []
    for theirs, (values, kind, option, read_name, identify, read) in zip(trained, (latents, texts), strict=True):
        ours = None
        with suppress(DataError):  # absent in a dry run; or different ones of a blend, which the run refuses
            ours = read_name()
        if theirs is None or ours is None or theirs == ours:
            continue
        try:
            if identify(theirs) == identify(ours):
                continue
            differs = read(theirs) != read(ours)
        except ConfigError:  # one cannot be read here
            differs = False
        fault = f"{weights} was trained with the {kind} {theirs!r}, and {values} of the data are of {ours!r}"
        cure = f"prepare the data with {option} {theirs}{other_cure}"
        if differs:
            raise ConfigError(f"{fault}, which is of another kind, size or scale; {cure}")
        lines.append(f"{fault}; if these are not the same, {cure}")
    return lines


def _resolved(name: str) -> Path | str:
    """Return the folder of an autoencoder; its name on the hub if it is not a local folder."""
    folder = folder_of(name)
    return name if folder is None else folder.resolve()
