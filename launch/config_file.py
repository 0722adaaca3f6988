"""A configuration as YAML: complete, readable, and equal after a round trip.

The layout is nemo-run's (`_target_` names the class) and that of `config.yaml` in a run folder, with every default
written out, so a file still describes the run after a default has changed. nemo-run's own reader (0.11) imports and
calls any `_target_`; this one accepts only a subclass of the setting's type, from packages of this project.
"""

import inspect
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin

import fiddle
import yaml
from nemo_run.config import Config, Partial

from dit.checkpoint.records import CONFIG_FILE
from dit.config_record import CLASS_KEY, import_trusted, to_record, without_former
from dit.durable_files import write_atomic
from dit.errors import ConfigError
from dit.run_config import TRAINING_FUNCTION, RunConfig
from dit.safe_files import read_yaml
from dit.training.pretrain import pretrain
from launch.overrides import annotation_of, component_types, normalise, parameters, parse_value


def built(task: Partial) -> RunConfig:
    """Build the parts of a run of `pretrain`, or of a function with the same parts."""
    parts = fiddle.build(task).keywords
    if parts.keys() != {part.name for part in fields(RunConfig)}:
        raise ConfigError(
            f"{_function_name(task)} does not take the parts of {TRAINING_FUNCTION}, so its runs cannot be checked, "
            "planned or measured; train with launch.train (--yes), or print the settings (--print-config)"
        )
    return RunConfig(**parts)


def _function_name(task: Partial) -> str:
    function = fiddle.get_callable(task)
    return f"{function.__module__}.{function.__qualname__}"


def summary(task: Partial) -> str:
    """Return every setting that differs from its default, one part per line."""
    names = [name for name in parameters(task) if hasattr(task, name)]
    width = max(map(len, names))
    lines = []
    for name in names:
        text = f"{name:<{width}}  {_short(getattr(task, name))}"
        lines.append(textwrap.fill(text, 118, subsequent_indent=" " * (width + 4), break_long_words=False))
    return "\n".join(lines)


def _short(value: object) -> str:
    if isinstance(value, Config | Partial):
        defaults = {k: p.default for k, p in inspect.signature(value.__fn_or_cls__).parameters.items()}
        changed = {k: v for k, v in value.__arguments__.items() if isinstance(v, Config) or v != defaults.get(k, v)}
        settings = ", ".join(f"{k}={_short(v)}" for k, v in changed.items())
        return f"{value.__fn_or_cls__.__name__}({settings})"
    return f"[{', '.join(map(_short, value))}]" if isinstance(value, list) else repr(value)


def dump(task: Partial) -> str:
    """Return the complete configuration as YAML, in the order of the signatures."""
    if (name := _function_name(task)) == TRAINING_FUNCTION:
        record = built(task).to_record()
    else:
        record = {CLASS_KEY: name, **to_record(fiddle.build(task).keywords)}
    return yaml.safe_dump(record, sort_keys=False, default_flow_style=False, width=110)


def write(task: Partial, path: str | Path) -> None:
    """Write the complete configuration to a file, which is created only when complete."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), dump(task))
    except OSError as error:
        raise ConfigError(f"cannot write the configuration to {path}: {error.strerror}; choose another file") from error


def load(path: str | Path) -> Partial:
    """Read a configuration of `pretrain` from a YAML file.

    Args:
        path: the file, or a run folder, of which `config.yaml` is read.
    """
    path = Path(path)
    if path.is_dir():
        path /= CONFIG_FILE
    raw = read_yaml(path, ConfigError, "--to-yaml FILE writes one")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}, not settings; --to-yaml FILE writes such a file")
    target = raw.pop(CLASS_KEY, TRAINING_FUNCTION)
    raw.pop("_partial_", None)
    if target != TRAINING_FUNCTION:
        raise ConfigError(f"{path} configures {target}, not {TRAINING_FUNCTION}; save a training run with --to-yaml")
    task = Partial(pretrain)
    try:
        _fill(task, raw, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    missing = [name for name in parameters(task) if not hasattr(task, name)]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; --to-yaml writes complete files")
    return task


def _fill(node: Config | Partial, raw: dict[str, Any], path: str) -> None:
    for name, value in raw.items():
        key = f"{path}.{name}" if path else str(name)
        setattr(node, name, _read(value, normalise(annotation_of(node, str(name), path)), key))


def _read(value: object, annotation: object, key: str) -> object:
    targets = component_types(annotation)
    if isinstance(value, dict) and (targets or CLASS_KEY in value):
        settings = without_former(value)
        kind = _target(settings.pop(CLASS_KEY, None), targets, key)
        config = Config(kind)
        _fill(config, settings, key)
        return config
    if isinstance(value, list):
        lists = [kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is list]
        element = get_args(lists[0])[0] if lists else Any
        return [_read(v, element, f"{key}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict):
        return value
    accepts_text = str in (annotation, *getattr(annotation, "__args__", ()))
    if isinstance(value, str) and accepts_text:
        return value
    if accepts_text and type(value) not in (*get_args(annotation), type(None)):
        raise ConfigError(f"{key} is a text, which YAML reads as {value!r} without quotes; write it in quotes")
    # Any other scalar is parsed like the same text on the command line, so that both accept the same values.
    return parse_value("none" if value is None else str(value), annotation, key)


def _target(name: object, types: list[type], key: str) -> type:
    """Import the class of a part, if it is from a trusted package and of the type of the setting."""
    if name is None and len(types) == 1 and not inspect.isabstract(types[0]):
        return types[0]
    kinds = " or ".join(t.__name__ for t in types) or "a plain value"
    if name is None:
        raise ConfigError(f"{key} names no class; add _target_ with the {kinds} to use")
    cls = import_trusted(str(name), f"{key}: {CLASS_KEY}", more_packages=["recipes"])
    if not inspect.isclass(cls) or not issubclass(cls, tuple(types)):
        raise ConfigError(f"{key}: {name} is not {kinds}; change _target_")
    return cls
