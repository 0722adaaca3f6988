"""Metadata for exported weights as plain JSON, for settings without a field in the files of other code bases.

Export writes `_megatron_dit` in a `config.json`, or `megatron_dit` in the metadata of a safetensors file, and import
reads it: objective, class names, latent size, sampling defaults, and all settings of the model. The values are not
trusted: they only fill fields of classes of this project and of `DIT_PACKAGES`, and their types are checked.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from inspect import isabstract
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dit.config_record import import_trusted
from dit.convert.diffusers_format import TrainedModel
from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.objectives import OBJECTIVES
from dit.objectives.base import Objective
from dit.ranges import ASPECTS
from dit.safe_files import parse_json

METADATA_KEY = "megatron_dit"
CONFIG_KEY = f"_{METADATA_KEY}"  # diffusers ignores keys that start with an underscore

MAX_NUMBER = 1e300  # larger numbers, integers included, are not accepted as settings; NaN is not either

REQUIRED = ("model", "objective", "latent_size", "sampling")
"""Fields of `TrainedModel` that every record has; older exports lack some of the others."""

Settings = TypeVar("Settings")


def to_record(trained: TrainedModel) -> dict[str, Any]:
    """Return a model's record, with JSON values only; `notes` and `recorded` belong to imported files."""
    names = [field.name for field in fields(trained) if field.name not in ("notes", "recorded")]
    return {
        **{name: getattr(trained, name) for name in names},
        "model": asdict(trained.model),
        "objective": {"name": name_of(trained.objective), **asdict(trained.objective)},  # type: ignore[call-overload]
        "latent_size": list(trained.latent_size),
        "sampling": dict(trained.sampling),
    }


def from_record(record: object, model_class: type[ModelConfig]) -> TrainedModel:
    """Rebuild a model from the result of `to_record`."""
    if not isinstance(record, Mapping) or not {*REQUIRED} <= record.keys():
        raise ConfigError(f"the export's record must have {', '.join(REQUIRED)}; export the run again")
    model, size = build(model_class, record["model"], "the record's model"), record["latent_size"]
    model.validate()
    if not _fits(size, list[int]) or len(size) != 3 or min(size) <= 0:
        raise ConfigError(f"the record's latent_size={size!r:.80} must be three positive integers, (T, H, W)")
    parts = {"model": model, "objective": objective_of(record["objective"]), "latent_size": tuple(size)}
    # An untrusted record must not add text to the output of commands.
    trained = build(TrainedModel, {**record, **parts, "notes": [], "recorded": True}, "the export's record")
    names, label = trained.class_names, model.condition("label")
    num_classes = 0 if label is None else label.num_classes or 0
    if len(names or ()) > num_classes:
        raise ConfigError(f"the record's class_names must be at most {num_classes} names, got {names!r:.200}")
    if trained.fps is not None and not trained.fps > 0:
        raise ConfigError(f"the record's fps={trained.fps!r} must be a positive number")
    if trained.reference_aspect not in (None, *ASPECTS):
        raise ConfigError(
            f"the record's reference_aspect={trained.reference_aspect!r:.80} must be one of {', '.join(ASPECTS)}"
        )
    return trained


def read_json_record(text: str, model_class: type[ModelConfig]) -> TrainedModel:
    """Read the record in a file's metadata."""
    try:
        record = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"the record in the file's metadata is not JSON: {error}; export the run again") from error
    return from_record(record, model_class)


def name_of(objective: Objective) -> str:
    """Return the name of an objective in recipes and records; for a class of a user, `package.module.Class`."""
    class_path = f"{type(objective).__module__}:{type(objective).__qualname__}"
    return next((name for name, path in OBJECTIVES.items() if path == class_path), class_path.replace(":", "."))


def objective_of(record: object) -> Objective:
    """Build an objective from its name and settings, such as `{"name": "ddpm", "prediction": "v"}`."""
    settings = dict(record) if isinstance(record, Mapping) else {"name": record}
    name, objective_class = settings.pop("name", None), None
    if isinstance(record, Mapping) and isinstance(name, str) and (name in OBJECTIVES or "." in name):
        objective_class = import_trusted(OBJECTIVES.get(name, name).replace(":", "."), "the record's objective")
    if not (
        isinstance(objective_class, type)
        and issubclass(objective_class, Objective)
        and is_dataclass(objective_class)
        and not isabstract(objective_class)
    ):
        raise ConfigError(f"objective {name!r:.200} is unknown; use one of {', '.join(OBJECTIVES)}")
    return build(objective_class, settings, f"objective {name}")


def build(settings_class: type[Settings], values: object, label: str) -> Settings:
    """Build a settings class from plain values; absent fields have their defaults."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{label} must be settings by name, got {values!r:.200}")
    assert is_dataclass(settings_class)
    hints = {f.name: get_type_hints(settings_class)[f.name] for f in fields(settings_class) if f.init}
    values = {name: _part(value, hints.get(name), f"{label}'s {name}") for name, value in values.items()}
    unknown = [str(name) for name in values if name not in hints]
    wrong = [
        f"{name}={value!r:.80}" for name, value in values.items() if name in hints and not _fits(value, hints[name])
    ]
    if unknown or wrong:
        parts = [("has no setting", unknown), ("cannot have", wrong)]
        reasons = "; ".join(f"{verb} {', '.join(names)}" for verb, names in parts if names)
        raise ConfigError(f"{label} {reasons}; its settings are {', '.join(hints)}")
    return settings_class(**values)


def _part(value: object, hint: Any, label: str) -> object:
    """Build a setting that is a settings class itself, or is Optional; return other values unchanged."""
    classes = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)]
    return build(classes[0], value, label) if classes and isinstance(value, Mapping) else value


def _fits(value: object, hint: Any) -> bool:
    """Return whether a JSON value has a field's type; numbers must be finite."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return value in inner
    if kind is Union:
        return any(_fits(value, option) for option in inner)
    if kind in (list, tuple):
        return isinstance(value, kind) and all(_fits(element, inner[0]) for element in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    return isinstance(value, kind or hint) and isinstance(value, bool) == (hint is bool)
