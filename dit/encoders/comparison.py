"""Comparison of the encoders of data with those that a model was trained with."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Optional

from dit.conditions import Condition
from dit.data_api import DataConfig
from dit.encoders.text_config import TextEncoderConfig, parse_line
from dit.encoders.vae import Geometry, folder_of
from dit.errors import ConfigError, DataError

Compared = Callable[[str], object]


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
        weights, other_cure: origin of the model, and end of the messages.

    Returns:
        A line for each encoder that has another name, and the same sizes or sizes that cannot be read.

    Raises:
        ConfigError: an encoder has other sizes.
    """
    entries = {entry for condition in conditions for entry in condition.stored_as}

    def selected(line: str) -> list[TextEncoderConfig]:
        made = [(entry, encoder.recorded()) for encoder in parse_line(line) for entry in encoder.makes]
        by_entry = sorted(made, key=lambda pair: pair[0])
        return [replace(encoder, makes=(entry,)) for entry, encoder in by_entry if entry in entries]

    def sizes(line: str) -> object:
        return [(encoder.makes, replace(encoder.geometry(), max_tokens=0)) for encoder in selected(line)]

    vae, texts = trained
    cases: tuple[tuple[str, str, Optional[str], Callable[[], Optional[str]], Compared, Compared], ...] = (
        ("autoencoder", "--vae or data.online_vae", vae, data.autoencoder, _resolved, Geometry.read),
        ("text encoder", "--text-encoder or data.online_text_encoder", texts, data.text_encoder, selected, sizes),
    )
    lines = []
    for kind, options, trained_name, read_name, identify, read_sizes in cases:
        name = None
        with suppress(DataError):  # the data are absent in a dry run, or the parts of a blend have different encoders
            name = read_name()
        if trained_name is None or name is None or trained_name == name:
            continue
        try:
            if identify(trained_name) == identify(name):
                continue
            differs = read_sizes(trained_name) != read_sizes(name)
        except ConfigError:  # one cannot be read here
            differs = False
        fault = f"{weights} was trained with the {kind} {trained_name!r}, and the data are encoded by {name!r}"
        cure = f"encode the data by the former ({options}){other_cure}"
        if differs:
            raise ConfigError(f"{fault}, which is of another kind, size or scale; {cure}")
        lines.append(f"{fault}; if these are not the same, {cure}")
    return lines


def _resolved(name: str) -> Path | str:
    folder = folder_of(name)
    return name if folder is None else folder.resolve()
