"""`--nemo-config FILE`: the YAML of a NeMo Imagen training as a recipe of ours.

A document becomes settings of ours as if they were given on the command line, by the rules of `launch.nemo_keys`. Every
key is mapped, named as without effect here, or refused; none is passed over.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import nemo_run as run

from dit.errors import ConfigError
from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.unet.config import UNetConfig
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.optimizer.schedules import Constant
from dit.parallel.dims import ParallelConfig
from dit.safe_files import DEEPEST, read_yaml
from dit.settings import CheckpointConfig, LoggingConfig, OptimizerConfig, SamplingConfig, TrainingConfig
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from launch import nemo_keys
from launch.nemo_keys import Preconditioning, UNetType
from launch.nemo_rules import Rule
from launch.overrides import apply_overrides
from recipes import registry

OPEN = "???"
"""OmegaConf's value of a key that somebody has to fill in."""
LONGEST_VALUE = 10_000
"""Characters of a value whose references were replaced."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class Row:
    """A line of the table: keys of the document, the settings they became, and how these deviate.

    Attributes:
        given: the keys and their values; empty where NeMo's default applies.
        note: as of `Rule`.
    """

    given: Mapping[str, object]
    settings: Sequence[str]
    note: str


def load(path: str | Path, load_component: Callable[[str], None]) -> tuple[run.Partial, list[Row]]:
    """Read a document of NeMo's Imagen.

    Args:
        path: the YAML file; `${key}` stands for the value of another key.

    Returns:
        The recipe, and what became of each key.
    """
    document = read_yaml(Path(path), ConfigError, "write the path of a YAML file after --nemo-config")
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise ConfigError(f"{path} has no section `model`; --nemo-config reads a training document of NeMo's Imagen")
    problems: list[str] = []
    if "optim" in document and "optim" not in document["model"]:  # some documents have the section at the top
        document["model"]["optim"] = document.pop("optim")
    values = dict(nemo_keys.leaves(document))
    values = _replace_references(values, problems, values)
    unet_type: UNetType = _read_choice(values, "model.unet_type", problems)
    preconditioning: Preconditioning = _read_choice(values, "model.preconditioning_type", problems)
    rules = nemo_keys.rules(unet_type, preconditioning, synthetic=values.get("model.data.synthetic_data") is True)
    open_keys = {key for key, value in values.items() if value == OPEN}
    open_keys -= {key for rule in rules if rule.has_no_effect for key in rule.keys}
    for key in sorted(open_keys):
        problems.append(f"{key}={OPEN} is left open; fill it in, or remove it")
        values[key] = None
    problems += _find_unknown_keys(values, [*nemo_keys.KINDS, *(key for rule in rules for key in rule.keys)])
    task = _start(unet_type, preconditioning, values)
    rows = [row for rule in rules if (row := _apply(rule, values, task, problems, load_component))]
    problems += _find_contradictions(rows)
    if problems:
        raise _make_error(path, problems)
    return task, rows


def load_network(
    document: object, source: str | Path, load_component: Callable[[str], None]
) -> tuple[run.Partial, int]:
    """Read the network, its objective and sampling from a training document, or from the settings in a `.nemo` file.

    Keys of the data and of the training are not read.

    Args:
        document: its section `model`, or all of it.

    Returns:
        A run with model, objective and sampling, and the side of the pictures in pixels.
    """
    if isinstance(document, dict) and "model" not in document:
        document = {"model": document}
    if not isinstance(document, dict) or not isinstance(document["model"], dict) or "unet" not in document["model"]:
        raise ConfigError(f"{source} has no section `unet`; give the document of the training by --nemo-config")
    problems: list[str] = []
    values = dict(nemo_keys.leaves(document))
    unet_type: UNetType = _read_choice(values, "model.unet_type", problems)
    preconditioning: Preconditioning = _read_choice(values, "model.preconditioning_type", problems)
    rules = nemo_keys.network_rules(unet_type, preconditioning)
    known_keys = {key for rule in rules for key in rule.keys}
    network = ("model.unet.", "model.preconditioning.")
    read = [key for key in values if key in known_keys or key.startswith(network)]
    values = _replace_references(values, problems, read)
    problems += _find_unknown_keys(values, sorted(known_keys))
    size = values.get("model.unet.image_size")
    if not isinstance(size, int) or size < 1:
        problems.append(f"model.unet.image_size={size} is no number of pixels")
    task = _start(unet_type, preconditioning, values)
    for rule in rules:
        _apply(rule, values, task, problems, load_component)
    if problems:
        raise _make_error(source, problems)
    assert size is not None
    return task, size


def _make_error(source: str | Path, problems: Sequence[str]) -> ConfigError:
    return ConfigError(f"{source}: {len(problems)} refused\n  " + "\n  ".join(problems))


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text: what is set, and then the keys that change nothing here."""
    lines = ["NeMo's document -> settings"]
    for row in rows:
        if row.settings:
            lines.append(f"  {_row_text(row)} -> {' '.join(row.settings)}" + (f"  ({row.note})" if row.note else ""))
    lines.append("keys without a setting here")
    lines += [f"  {_row_text(row)}: {row.note}" for row in rows if not row.settings]
    return "\n".join(lines)


def _row_text(row: Row) -> str:
    return _entries_text(row.given) or "NeMo's default"


def _entries_text(values: Mapping[str, object]) -> str:
    return ", ".join(key if isinstance(value, dict) else f"{key}={value}" for key, value in values.items())


def _replace_references(values: Mapping[str, Any], problems: list[str], keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of some keys, with `${key}` replaced by the value of that key."""
    resolved: dict[str, Any] = {}

    def value_of(key: str, path: tuple[str, ...]) -> Any:
        if key not in resolved:
            resolved[key] = resolve(key, path)
        return resolved[key]

    def resolve(key: str, path: tuple[str, ...]) -> Any:
        value = values[key]
        if not isinstance(value, str):
            return value
        names = _REFERENCE.findall(value)
        for name in names:
            if name not in values or name in path:
                raise ConfigError(f"{key}={value}: {name} is {'its own value' if name in path else 'no key'}")
        if len(path) > DEEPEST:
            raise ConfigError(f"{key}={value}: references are nested deeper than {DEEPEST} levels")
        parts = {name: value_of(name, (*path, name)) for name in names}
        if _REFERENCE.fullmatch(value):
            return parts[names[0]]
        texts = {name: str(part) for name, part in parts.items()}
        if sum(len(texts[name]) for name in names) > LONGEST_VALUE:
            raise ConfigError(f"{key}={value}: its references become a text of more than {LONGEST_VALUE:,} characters")
        return _REFERENCE.sub(lambda match: texts[match[1]], value)

    answers: dict[str, Any] = {}
    for key in keys:
        try:
            answers[key] = value_of(key, (key,))
        except ConfigError as error:
            problems.append(str(error))
            answers[key] = None
    return answers


def _read_choice(values: Mapping[str, Any], key: str, problems: list[str]) -> Any:
    """Return the value of a key that selects the rules; the first choice where it is wrong."""
    choices = get_args(nemo_keys.KINDS[key])
    if values.get(key) in choices:
        return values[key]
    problems.append(f"{key}={values.get(key, 'missing')} is none of {', '.join(choices)}")
    return choices[0]


def _find_unknown_keys(values: Mapping[str, Any], known_keys: Sequence[str]) -> Iterator[str]:
    for key, value in values.items():
        if key not in known_keys and not (value is None and any(name.startswith(f"{key}.") for name in known_keys)):
            yield f"{key}={value}: no such key is known{_suggest(key, known_keys)}"


def _suggest(key: str, known_keys: Sequence[str]) -> str:
    """Return the nearest key of the same section, else of any section."""
    section, _, name = key.rpartition(".")
    for candidates in ([key for key in known_keys if key.rpartition(".")[0] == section], known_keys):
        nearest = registry.closest(name, {key.rpartition(".")[2] for key in candidates}, count=1)
        if nearest:
            return f"; did you mean {next(key for key in candidates if key.rpartition('.')[2] == nearest[0])}?"
    return ""


def _start(unet_type: UNetType, preconditioning: Preconditioning, values: Mapping[str, Any]) -> run.Partial:
    """Return the run that the settings are applied to: our defaults, with the sampling of NeMo's inference."""
    edm = preconditioning == "EDM"
    large = values.get("model.unet.image_size") == 1024
    steps, scale = (30, 7.5) if unet_type == "base" else (20, 7.5 if large else 8.0)
    return run.Partial(
        pretrain,
        model=run.Config(EfficientUNetConfig if unet_type == "sr" else UNetConfig),
        data=run.Config(EnergonData, path="data/imagen_images", bucket_by_shape=True),
        objective=run.Config(EDM) if edm else run.Config(DDPM, network_time="log_snr"),
        optimizer=run.Config(OptimizerConfig),
        schedule=run.Config(Constant),
        parallel=run.Config(ParallelConfig),
        training=run.Config(TrainingConfig),
        checkpoint=run.Config(CheckpointConfig),
        logging=run.Config(LoggingConfig),
        sampling=run.Config(
            SamplingConfig,
            solver="heun" if edm else "ancestral",
            num_steps=steps,
            guidance_scale=scale,
            thresholding="dynamic",
        ),
    )


def _apply(
    rule: Rule,
    values: Mapping[str, Any],
    task: run.Partial,
    problems: list[str],
    load_component: Callable[[str], None],
) -> Row | None:
    """Apply a rule to the run; return its row if the document has one of its keys or a default of NeMo's is ours."""
    entries = {key: value for key, value in values.items() if key in rule.keys and value is not None}
    shown_keys = _entries_text(entries) or ", ".join(rule.keys)
    missing_keys = [key for key in rule.keys if key not in entries]
    if rule.required and missing_keys:
        problems.append(f"{missing_keys[0]} is missing, and NeMo has no default for it")
        return None
    try:
        arguments = {key.rpartition(".")[2]: value for key, value in entries.items()}
        settings = [f"{path}={_text(value)}" for path, value in rule.settings(**arguments).items()]
        apply_overrides(task, settings, load_component)
    except ConfigError as error:
        problems.append(f"{shown_keys}: {error}")
        return None
    except TypeError as error:
        problems.append(f"{shown_keys}: a value of another type is expected ({error})")
        return None
    return Row(entries, settings, rule.note) if entries or settings else None


def _text(value: object) -> str:
    return "none" if value is None else str(value)


def _find_contradictions(rows: Sequence[Row]) -> Iterator[str]:
    """Find settings that two keys give different values."""
    first_rows: dict[str, tuple[str, Row]] = {}
    for row in rows:
        for setting in row.settings:
            path = setting.partition("=")[0]
            first_setting, first_row = first_rows.setdefault(path, (setting, row))
            if first_setting != setting:
                yield f"{_row_text(first_row)} and {_row_text(row)} disagree; write the same value"
