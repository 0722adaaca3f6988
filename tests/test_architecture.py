"""Rules of the architecture, such as allowed imports between packages (tests/support/import_rules.py)."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

from tests.support.import_rules import EXCEPTIONS, HEAVY_HOMES, MAY_IMPORT

ROOT = Path(__file__).parents[1]
PACKAGES = ("dit", "recipes", "energon_data", "launch", "benchmarks", "examples")
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


@cache
def walk(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Return (line, dotted name) of all imports of a file, also inside functions and by `import_module`."""
    package, found = list(path.with_suffix("").parts[:-1]), []
    for node in walk(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parent, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append((node.lineno, node.args[0].value))
    return found


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def part_of(name: str) -> str:
    """Return the key of `MAY_IMPORT` for a dotted name of this project."""
    first, *rest = name.split(".")
    return f"dit.{rest[0]}" if first == "dit" and rest else first


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Walk nodes that run at import: all except bodies and defaults of functions."""
    yield node
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and name in ("args", "body"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from at_import(child)


def imported_at_import(path: Path) -> set[str]:
    """Return the dotted names of the imports that run at import, without those for types only."""
    nodes = list(at_import(tree(path)))
    guards = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    for_types = {child for guard in guards for child in ast.walk(guard)}
    lines = {n.lineno for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) and n not in for_types}
    return {name for line, name in imports(path) if line in lines}


IMPORTED_BY_TRAINING = {"dit", "torch", "megatron", "einops", "numpy", "safetensors", "yaml"}
"""Packages that `dit.training.pretrain` may import; Megatron-Core imports einops and numpy, too."""


@pytest.fixture(scope="module", autouse=True)
def _free_trees() -> Iterator[None]:
    """Free the syntax trees, which would slow down the garbage collections of later tests."""
    yield
    for cached in (tree, walk, imports):
        cached.cache_clear()


def report(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


def test_the_table_has_no_cycle():
    """In the table, `dit` stands for all its parts."""
    parts = {part for part in MAY_IMPORT if part.startswith("dit.")}
    graph = {row: {p for n in names for p in (parts if n == "dit" else {n})} for row, names in MAY_IMPORT.items()}
    assert set().union(*graph.values()) <= set(MAY_IMPORT)
    list(TopologicalSorter(graph).static_order())


def test_files_have_no_import_cycle():
    """Imports between files have no cycle, including imports inside functions and imports only for types."""
    graph = {
        own: {module for _, name in imports(path) for module in (name, name.rpartition(".")[0]) if module in MODULES}
        - {own}
        for own, path in MODULES.items()
    }
    list(TopologicalSorter(graph).static_order())


def test_every_part_has_a_row():
    parts = {part_of(".".join(path.with_suffix("").parts)) for path in FILES}
    report(sorted(parts - {"dit.__init__"} - set(MAY_IMPORT)))


def test_imports_go_one_way():
    found = []
    for path in FILES:
        own = part_of(".".join(path.with_suffix("").parts))
        for line, name in imports(path):
            part = part_of(name)
            if part.split(".")[0] not in PACKAGES or part in (own, "dit.__version__"):
                continue
            allowed = MAY_IMPORT.get(own, set())
            if part not in allowed and not (part.startswith("dit.") and "dit" in allowed):
                found.append(f"{path}:{line}: {own} must not import {name}; it sees {sorted(allowed)}")
            for start, package, unless in EXCEPTIONS:
                excepted = any(inside(name, other) for other in unless)
                if str(path).startswith(start) and inside(name, package) and not excepted:
                    found.append(f"{path}:{line}: {start} must not import {name}")
    report(found)


@pytest.mark.parametrize("package", ["tests", "examples"])
def test_no_package_needs_the_tests_or_the_examples(package: str):
    """An installed copy has no tests. Names in strings count as well, such as tasks of worker processes."""
    report(
        [
            f"{path}:{node.lineno}: {ast.unparse(node)}"
            for path in FILES
            if path.parts[0] != package
            for node in walk(path)
            if (isinstance(node, ast.Constant) and re.match(rf"{package}\.\w", str(node.value)))
            or (isinstance(node, ast.Import | ast.ImportFrom) and re.search(rf"\b{package}\b", ast.unparse(node)))
        ]
    )


def test_only_preparation_encodes():
    """Only `prepare` and `inspect` load VAEs and text models; other code of `energon_data` imports their sizes."""
    loading = ("energon_data/prepare/", "energon_data/inspect.py")
    arithmetic = ("dit.encoders.vae.Geometry", "dit.encoders.text_config")
    report(
        [
            f"{path}:{line}: {name}"
            for path in FILES
            if str(path).startswith("energon_data/") and not str(path).startswith(loading)
            for line, name in imports(path)
            if inside(name, "dit.encoders") and not any(inside(name, known) for known in arithmetic)
        ]
    )


def test_a_backbone_never_imports_another():
    found = []
    for path in FILES:
        if path.parts[:2] != ("dit", "models") or len(path.parts) < 4:
            continue
        own = f"dit.models.{path.parts[2]}"
        for line, name in imports(path):
            other = name.split(".")[2] if inside(name, "dit.models") and name.count(".") >= 2 else None
            folder = other is not None and (ROOT / "dit" / "models" / other).is_dir()
            # Models of the `streams` family share its sizes, and may extend its network.
            if folder and not inside(name, own) and other != "streams":
                found.append(f"{path}:{line}: {own} must not import {name}; share it through dit.layers")
    report(found)


@pytest.mark.parametrize("package", HEAVY_HOMES)
def test_heavy_packages_have_one_home(package: str):
    homes = HEAVY_HOMES[package]
    report(
        [
            f"{path}:{line}: {name} belongs to {', '.join(homes)}"
            for path in FILES
            if not str(path).startswith(homes)
            for line, name in imports(path)
            if inside(name, package)
        ]
    )


def test_only_backbone_models_use_megatron_in_models():
    """Configs and layers of backbones use the provider; only `model.py` gathers tokens with Megatron-Core."""
    report(
        [
            f"{path}:{line}: {name}"
            for path in FILES
            if path.parts[:2] == ("dit", "models") and path.name != "model.py"
            for line, name in imports(path)
            if inside(name, "megatron")
        ]
    )


def test_cuda_is_named_in_backends_and_kernels_only():
    found = []
    for path in FILES:
        if str(path).startswith(("dit/backends/", "dit/kernels/")):
            continue
        for node in walk(path):
            literal = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if literal and re.fullmatch(r"cuda(:\d*)?", node.value):
                found.append(f"{path}:{node.lineno}: the device {node.value!r}")
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
                found.append(f"{path}:{node.lineno}: torch.cuda; ask dit.backends.device")
    report(found)


def test_tables_reach_the_device_without_a_wait():
    """`to_device` and `SequenceLayout.tensor` copy from pinned memory; `torch.tensor(..., device=...)` synchronizes."""
    rooms = ("step", "objectives", "kernels", "layers", "models", "context_parallel", "layout", "batch", "conditions")
    report(
        [
            f"{path}:{node.lineno} {ast.unparse(node)}"
            for path in FILES
            if path.parts[0] == "dit" and path.parts[1].removesuffix(".py") in rooms
            for node in walk(path)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and (
                (node.func.attr in ("tensor", "as_tensor") and any(k.arg == "device" for k in node.keywords))
                or (node.func.attr == "to" and node.args and ast.unparse(node.args[0]).endswith("layout.device"))
            )
        ]
    )


def assigned_attributes(node: ast.AST) -> list[ast.Attribute]:
    """Return the attributes that a statement sets, by assignment or by `setattr` with a literal name."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        parts = [part for target in targets for part in getattr(target, "elts", [target])]
        return [part for part in parts if isinstance(part, ast.Attribute)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and isinstance(node.args[1], ast.Constant):
        return [ast.Attribute(value=node.args[0], attr=node.args[1].value)]
    return []


def test_only_set_sharding_writes_attributes_of_megatron():
    """Exempt: settings of the same names in a layout (`recipe.parallel.x`) and in Megatron-Core's config."""
    names = {
        *("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce"),
        *("pipeline_parallel", "shared", "shared_embedding", "average_gradients_across_tp_domain", "sharding"),
    }
    report(
        [
            f"{path}:{node.lineno}: {ast.unparse(target)} is set; let dit.backends.sharding derive it"
            for path in FILES
            if str(path) != "dit/backends/sharding.py"
            for node in walk(path)
            for target in assigned_attributes(node)
            if target.attr in names and ast.unparse(target.value).rpartition(".")[2] not in ("parallel", "config")
        ]
    )


def test_importing_defines_names_and_does_nothing_else():
    """No module reads the environment or queries a device at import."""
    forbidden = ("os.environ", "os.getenv", "torch.cuda", "torch.distributed.init_process_group")
    report(
        [
            f"{path}:{node.lineno}: {ast.unparse(node)} at import"
            for path in FILES
            for node in at_import(tree(path))
            if isinstance(node, ast.Attribute) and ast.unparse(node) in forbidden
        ]
    )


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (
            "dit, dit.models, dit.errors, recipes, launch, energon_data",
            {"torch", "megatron", "numpy", "nemo_run", "wandb"},
        ),
        ("launch.status", {"torch", "megatron", "nemo_run", "wandb"}),
    ],
)
def test_importing_a_package_imports_nothing_heavy(modules: str, heavy: set[str]):
    """`launch.status`, which reads files, starts within a second."""
    program = f"import sys, {modules}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_training_imports_few_packages_besides_torch_and_megatron_core():
    """Importing Megatron-Core takes four times as long as torch, so other packages must stay few."""
    packages, seen, modules = set(), set(), {"dit.training.pretrain"}
    while modules:
        seen |= modules
        names = {name for module in modules for name in imported_at_import(MODULES[module])}
        packages |= {name.partition(".")[0] for name in names}
        parts = {part for name in names for part in accumulate(name.split("."), "{}.{}".format)}
        modules = (parts & MODULES.keys()) - seen
    assert packages - set(sys.stdlib_module_names) == IMPORTED_BY_TRAINING


def test_no_error_is_silently_ignored():
    """No bare `except`, and no `except Exception: pass`."""
    found = []
    for path in FILES:
        for node in walk(path):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            silent = all(isinstance(statement, ast.Pass) for statement in node.body)
            if node.type is None or (broad and silent):
                found.append(f"{path}:{node.lineno}: name the errors that are expected here")
    report(found)


def test_every_todo_has_an_issue_number():
    """Write `TODO(#12)`, so that open work has an issue."""
    sources = [*FILES, *(p.relative_to(ROOT) for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__))]
    report(
        [
            f"{path}:{number}: {line.strip()}"
            for path in sources
            for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
            if re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", line)
        ]
    )


def test_annotations_of_recipes_are_evaluated_objects():
    """nemo-run reads annotations at run time, so no module imports `annotations` from `__future__`."""
    report(
        [f"{p}:{line}: {name}" for p in FILES for line, name in imports(p) if inside(name, "__future__.annotations")]
    )


def test_every_module_has_a_docstring():
    """An empty `__init__.py` needs no docstring."""
    report([str(path) for path in FILES if tree(path).body and not ast.get_docstring(tree(path))])


def test_files_have_a_bounded_length():
    """A file with more than 500 lines has several jobs; split it."""
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in FILES}
    report([f"{path}: {length} lines" for path, length in lengths.items() if length > 500])
