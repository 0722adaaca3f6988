"""Overrides `key.path=value` on a recipe, typed by the signature of the configured class.

nemo-run parses the values. The path is resolved here, because nemo-run 0.11 reports a misspelt key without the existing
names, interprets any word as a factory before it interprets it as a string (it would call a function of the main module
for a run folder of that name), and does not support `X | None`.
"""

import dataclasses
import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Optional, TypeAlias, Union, get_args, get_origin

import catalogue
from nemo_run.cli.cli_parser import CLIException, Operation, PythonicParser, TypeParser
from nemo_run.config import Config, Partial, get_type_namespace

from dit.command_line import closest, did_you_mean
from dit.config_record import TRUST_VARIABLE, user_packages
from dit.errors import ConfigError
from dit.patches import patches
from dit.safe_files import parse_yaml
from dit.terminal import announce
from launch.argument_types import split_arguments
from launch.grid import SIZES
from recipes import registry

Node: TypeAlias = Config | Partial
_PLAIN = (bool, int, float, str, list, dict, tuple, Path, type(None))
_CALL = re.compile(r"^([A-Za-z_][\w.]*)(?:\((.*)\))?$", re.DOTALL)


def apply_overrides(task: Partial, overrides: list[str]) -> None:
    """Apply overrides to a recipe in place.

    Keys with fewer dots are applied first, so `objective=edm` comes before `objective.sigma_data=1`; keys with equally
    many dots are applied in the order of the command line.
    """
    parsed = [(*_split(text), text) for text in overrides]
    before = _parts(task)
    for key, value, text in sorted(parsed, key=lambda item: item[0].count(".")):
        _apply(task, key, value, text)
    for key, part in _parts(task).items():
        if key in before and part is not before[key]:
            _announce_defaults(key, before[key], part)


def _announce_defaults(key: str, before: Node, part: Node) -> None:
    """Name the settings of a replaced part that its successor also has, but with defaults instead."""
    lost = {
        name: value
        for name, value in before.__arguments__.items()
        if isinstance(value, _PLAIN) and name in parameters(part)
        if name not in part.__arguments__ and value != value_of(part, name)
    }
    if lost:
        defaults = " ".join(f"{key}.{name}={value_of(part, name)}" for name in lost)
        settings = " ".join(f"{key}.{name}={value}" for name, value in lost.items())
        announce(f"{key} was replaced and now has the defaults {defaults}; to keep the former values, add {settings}")


def value_in(overrides: list[str], key: str) -> Optional[str]:
    """Return the last text that is assigned to a key; None if there is none, or it is `none`."""
    values = [value for name, value in map(_split, overrides) if name == key]
    text = _unquote(values[-1]) if values else "none"
    return None if text.lower() in ("none", "null") else text


def _split(text: str) -> tuple[str, str]:
    try:
        ((key, (op, value)),) = PythonicParser().parse(text).items()
    except CLIException as error:
        raise ConfigError(f"{text!r} is not an override; write key.path=value, with a value after the sign") from error
    if op is not Operation.ASSIGN:
        raise ConfigError(f"{text!r} is not an assignment, and overrides only assign; write {key}=VALUE")
    if any(not step.partition("[")[0] for step in key.split(".")):
        raise ConfigError(f"{text!r} names no setting between its dots; write key.path=value")
    return key, value


def _apply(task: Partial, key: str, value: str, text: str) -> None:
    *parents, name = key.split(".")
    node: Node = task
    for depth, parent in enumerate(parents):
        node = _child(node, parent, ".".join(parents[:depth]))
    path = ".".join(parents)
    if "[" in name:
        full_key = _join(path, name.partition("[")[0])
        raise ConfigError(f"{text}: entries are not assigned one by one; write the list in full, {full_key}=[...]")
    try:
        annotation = annotation_of(node, name, path)
    except ConfigError as error:
        setting = SIZES.get(name, name)  # such as `tp`
        elsewhere = [k for k in all_keys(task) if k.rpartition(".")[2] == setting and k != key]
        if elsewhere:
            raise ConfigError(f"{key} does not exist; did you mean {' or '.join(elsewhere)}?") from error
        targets = component_types(normalise(parameters(task)[path])) if len(parents) == 1 else []
        others = [n for n in _component_names(targets) if name in parameters(_component(n, targets, path))]
        if 0 < len(others) <= 2:  # more names say little: half of the models have a `num_layers`
            raise ConfigError(f"{error}; {path}={f' or {path}='.join(others)} has it") from error
        raise
    try:
        setattr(node, name, parse_value(value, annotation, key))
    except ConfigError as error:
        if (other := _unquote(value)) not in parameters(node):
            raise
        full_key, values = _join(path, other), describe(normalise(parameters(node)[other]))
        raise ConfigError(f"{error}; did you mean {full_key}, which is {values}?") from error


def _child(node: Node, part: str, path: str) -> Node:
    """Follow one step of a path, `name` or `name[3]`."""
    name, *indices = re.findall(r"[^\[\]]+", part)
    annotation_of(node, name, path)
    child = value_of(node, name)
    for index in indices:
        if not isinstance(child, list) or not index.isdecimal() or int(index) >= len(child):
            key = _join(path, name)
            cure = f"use an index below {len(child)}" if isinstance(child, list) else f"write {key} without [{index}]"
            raise ConfigError(f"{_join(path, part)}: {key} has no entry {index}; {cure}")
        child = child[int(index)]
    if not isinstance(child, Config | Partial):
        key = _join(path, part)
        names = _component_names(component_types(normalise(parameters(node)[name])))
        choices = " or ".join(f"{key}={name}" for name in names[:3])
        cure = f"add {choices} first" if names else f"write {_join(path, name)}=VALUE"
        raise ConfigError(f"{key}={child!r} has no settings of its own; {cure}")
    return child


def parameters(target: Node) -> dict[str, object]:
    """Return the settings of a configured function or class and their annotations."""
    return _annotations(target.__fn_or_cls__)


@cache
def _annotations(fn: Callable[..., Any]) -> dict[str, object]:
    hints = typing.get_type_hints(fn.__init__ if inspect.isclass(fn) else inspect.unwrap(getattr(fn, "func", fn)))
    return {name: hints.get(name, Any) for name in inspect.signature(fn).parameters}


def value_of(node: Node, name: str) -> Any:
    """Return the value of a setting, its default if it is not assigned, or None if it has neither."""
    return values_of(node).get(name)


def values_of(node: Node) -> dict[str, Any]:
    """Return the values and defaults of all settings that have one.

    fiddle's own `getattr` raises if a default has a factory.
    """
    fn, values = node.__fn_or_cls__, dict[str, Any]()
    fields = dataclasses.fields(fn) if dataclasses.is_dataclass(fn) else ()
    factories = {f.name: f.default_factory for f in fields if f.default_factory is not dataclasses.MISSING}
    for name, parameter in inspect.signature(fn).parameters.items():
        if name in node.__arguments__:
            values[name] = node.__arguments__[name]
        elif name in factories:
            values[name] = factories[name]()
        elif parameter.default is not inspect.Parameter.empty:
            values[name] = parameter.default
    return values


def annotation_of(node: Node, name: str, path: str) -> object:
    """Return the annotation of a setting."""
    annotations = parameters(node)
    name = name.partition("[")[0]
    if name in annotations:
        return annotations[name]
    near = [_join(path, key) for key in closest(name, annotations)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(annotations)}"
    raise ConfigError(f"{_join(path, name)}: {node.__fn_or_cls__.__name__} has no setting {name!r}; {hint}")


def all_keys(node: Node) -> list[str]:
    """Return the dotted paths of all settings below a configuration."""
    return [*parameters(node), *(_join(key, name) for key, part in _parts(node).items() for name in parameters(part))]


def _parts(node: Node, path: str = "") -> dict[str, Node]:
    """Return the configurations below another one by their dotted paths."""
    children = {_join(path, name): value for name, value in values_of(node).items()}
    parts = {key: child for key, child in children.items() if isinstance(child, Config | Partial)}
    return parts | {k: part for key, child in parts.items() for k, part in _parts(child, key).items()}


def parse_value(text: str, annotation: object, key: str) -> Any:
    """Turn the text of an override into a value of the annotated type."""
    annotation = normalise(annotation)
    targets = component_types(annotation)
    is_none = text.lower() in ("none", "null") and type(None) in get_args(annotation)
    if targets and not is_none:
        return _component(text, targets, key)
    if annotation is str:
        return _unquote(text)
    kinds = get_args(annotation) if get_origin(annotation) is Union else (annotation,)
    if any(get_origin(kind) is list and get_origin(get_args(kind)[0]) is dict for kind in kinds):
        return _list_of_mappings(text, key)
    try:
        value = TypeParser().get_parser(annotation)(text, annotation)
    except Exception as error:
        values = describe(annotation)
        fault = f"is unknown; use {values}" if values.startswith("one of ") else f"is not {values}"
        raise ConfigError(f"{key}={text} {fault}") from error
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{key}={text} is not {describe(annotation)}")
    return value


def _list_of_mappings(text: str, key: str) -> Optional[list[dict[str, Any]]]:
    """Read `[{name: value}, ...]`, a YAML list, or none."""
    try:
        value = parse_yaml(text)
    except ValueError:
        value = text
    if str(value).lower() == "none":
        return None
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ConfigError(f"{key}={text} is not a list such as [{{path: a, weight: 1}}], with a space after each colon")
    return value


def load_component(name: str) -> None:
    """Import the module that registers the component of this name.

    If no module of this project does, the packages in `DIT_PACKAGES` are imported.
    """
    modules = [entry.module for entry in registry.components() if entry.name == name]
    for module in modules or user_packages():
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise ConfigError(
                f"{TRUST_VARIABLE} names {module!r}, which is not installed and not in this folder"
            ) from error


@patches(
    "nemo-run 0.11",
    "nemo_run/config.py: get_type_namespace, and its catalogue of factories",
    why="nemo-run interprets any word first as a factory",
)
def _component(text: str, targets: list[type], key: str) -> Config:
    """Build the named part, with the settings in its parentheses if there are any."""
    match = _CALL.match(text.strip())
    name, inner = (match.group(1), match.group(2)) if match else (text, None)
    load_component(name)
    for target in targets:
        namespace = get_type_namespace(target)
        if catalogue.check_exists(namespace, name):
            part = catalogue._get((namespace, name))()
            for argument in split_arguments(inner or ""):
                try:
                    _apply(part, *_split(argument), argument)
                except ConfigError as error:
                    raise ConfigError(f"{key}={text}: {error}") from error
            return part
    names = _component_names(targets)
    if text.partition("(")[0] in names:
        raise ConfigError(f"{key}={text} lacks a parenthesis at its end; write '{key}=NAME(setting=VALUE)'")
    cure = did_you_mean(name, names) or f"; choose one of {', '.join(names)}." if names else ""
    cure = f"{cure} A name of your own needs {TRUST_VARIABLE}=MODULE" if names else "; set its fields one by one"
    raise ConfigError(f"{key}={text}: no {' or '.join(sorted(t.__name__ for t in targets))} of that name{cure}")


def _component_names(targets: list[type]) -> list[str]:
    """Return the names of the components of these types."""
    type_names = {t.__name__ for t in targets}
    return [entry.name for entry in registry.components() if entry.target.split(".")[-1] in type_names]


def parse_call(function: Callable[..., Any], text: str, option: str) -> partial[Any]:
    """Return the call of a function that an option names as `NAME` or `NAME(a=1, b=[2, 3])`."""
    name, has_arguments, arguments = text.partition("(")
    if has_arguments and not arguments.endswith(")"):
        raise ConfigError(f"{option} {text}: a parenthesis at its end is missing; write {name}(...)")
    annotations = _annotations(function) if has_arguments else {}
    values: dict[str, Any] = {}
    for word in split_arguments(arguments.removesuffix(")")):
        key, _, value = (part.strip() for part in word.partition("="))
        if key not in annotations:
            names = ", ".join(annotations)
            takes = f"takes {names}" if names else "takes no arguments; its settings can be overridden"
            near = did_you_mean(key, annotations)
            raise ConfigError(f"{option} {text}: {name} has no argument {key!r}, it {takes}{near}")
        if not value:
            raise ConfigError(f"{option} {text}: {key} has no value; write {key}=VALUE")
        values[key] = parse_value(value, annotations[key], f"{option} {text}: {key}")
    return partial(function, **values)


def normalise(annotation: object) -> object:
    """Rewrite `X | None` as `Optional[X]`, which nemo-run supports, at any depth."""
    origin, args = get_origin(annotation), tuple(map(normalise, get_args(annotation)))
    if origin is types.UnionType or origin is Union:
        return Union[args]
    if origin is list and args:
        return types.GenericAlias(list, args)
    return annotation


def component_types(annotation: object) -> list[type]:
    """Return our classes in an annotation; empty for plain values."""
    if get_origin(annotation) is Union:
        return [t for arg in get_args(annotation) for t in component_types(arg)]
    if annotation is Any or get_origin(annotation) is not None or not inspect.isclass(annotation):
        return []
    return [] if issubclass(annotation, _PLAIN) else [annotation]


def describe(annotation: object) -> str:
    """Describe the values that a setting accepts."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is Union:
        return " or ".join(describe(a) for a in args)
    if origin is list:
        plurals = {int: "whole numbers", float: "numbers", str: "texts", bool: "truth values"}
        numbers = args and args[0] in (int, float)
        example = "[1, 2]" if numbers else "['a', 'b'] (in a shell, put the argument in double quotes)"
        return f"a list of {plurals.get(args[0], 'values') if args else 'values'} such as {example}"
    words: dict[object, str] = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "none",
    }
    return words.get(annotation) or f"a {getattr(annotation, '__name__', annotation)}"


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
