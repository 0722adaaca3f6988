"""Names that packages add to the commands: read from a clone without installation, else from entry points."""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dit import extensions
from dit.errors import ConfigError
from energon_data import folder as data_folder
from energon_data.prepare.__main__ import main as prepare
from launch import cli, evaluate
from launch.train import call_recipe
from recipes import registry
from tests.support import recipes_page

MODULE = '''
import nemo_run as run

from dit.training.pretrain import pretrain
from energon_data.prepare.command import Command
from launch.measurement import Metric
from recipes.tiny import tiny_dit


@run.cli.factory(target=pretrain)
def mine() -> run.Partial:
    """A recipe of a user: any machine."""
    recipe = tiny_dit()
    recipe.training.num_steps = 3
    return recipe


BEAUTY = Metric("how beautiful", lambda args, generator: None)
SKIES = Command(
    "pictures of skies", lambda parser: parser.add_argument("--out"), lambda args: print("blue"), {"sky": ""}
)
'''


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Clear the cache of names before and after a test."""
    caches = (extensions.registered, extensions._of_clone, registry.entries)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs a package with entry points, as pip does."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(distribution: str, **groups: str) -> None:
        info = tmp_path / f"{distribution.replace('-', '_')}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        lines = [f"[megatron_dit.{kind}]\n{points}\n" for kind, points in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))

    return write


@pytest.fixture
def skies(install: Callable[..., None], tmp_path: Path) -> Iterator[None]:
    """Install a package with a recipe, a metric and a preparation."""
    (tmp_path / "skies.py").write_text(MODULE)
    points = {"recipes": "skies = skies", "metrics": "beauty = skies:BEAUTY", "preparations": "skies = skies:SKIES"}
    install("skies", **points)
    yield
    sys.modules.pop("skies", None)


def test_a_clone_takes_precedence_over_its_installed_copy(install: Callable[..., None]):
    """The installed copy may be an older revision."""
    install("megatron-dit", metrics="old = dit.errors:ConfigError")
    assert {"letters", "letter_edits", "pictograms", "avatars", "sharpness"} == extensions.registered("metrics").keys()
    assert "letters" in extensions.load("preparations", {})


def test_an_installed_copy_has_the_names_of_its_entry_points(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    install("megatron-dit", metrics="old = dit.errors:ConfigError")
    monkeypatch.setattr(extensions, "PROJECT", tmp_path / "pyproject.toml")
    assert extensions.load("metrics", {})["old"] is ConfigError
    assert extensions.own_packages() == set()


def test_names_of_a_package_are_those_of_the_commands(skies: None, capsys: pytest.CaptureFixture):
    assert evaluate.build_parser().parse_args(["--metric", "beauty", "--checkpoint", "run"]).metric == "beauty"
    page = evaluate.build_parser().format_help()
    assert all(re.search(f"{name}  +{re.escape(m.summary)}", page) for name, m in evaluate.metrics().items())
    assert "how beautiful" in page
    assert prepare(["skies", "--out", "here"]) == 0
    assert "blue" in capsys.readouterr().out
    assert data_folder._prepare_words("sky") == "skies"
    assert "A recipe of a user: any machine." in registry.listing().partition(registry.REGISTERED)[2]
    assert call_recipe("mine").training.num_steps == 3
    with pytest.raises(ConfigError, match="did you mean mine"):
        cli.check_factory("mined")
    assert "mine" not in recipes_page.page()


def test_extensions_that_cannot_be_imported_are_omitted_with_a_warning(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
):
    install("broken", metrics="a = not_there:X\nb = dit.errors:NotThere", recipes="c = not_there.recipes")
    with caplog.at_level(logging.WARNING):
        assert not {"a", "b"} & extensions.load("metrics", {}).keys()
        assert "tiny_dit" in {entry.name for entry in registry.recipes()}
    assert [record.message.partition(" is left out")[0] for record in caplog.records] == [
        "a of metrics",
        "b of metrics",
        "c of recipes",
    ]


def test_a_package_that_raises_an_error_is_omitted_from_the_recipes(
    install: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "broken_parent").mkdir()
    (tmp_path / "broken_parent" / "__init__.py").write_text("None.attribute\n")
    (tmp_path / "broken_parent" / "recipes.py").touch()
    install("broken-parent", recipes="broken = broken_parent.recipes")
    with caplog.at_level(logging.WARNING):
        assert any(entry.name == "tiny_dit" for entry in registry.entries())
    assert [record.message.partition(" is left out")[0] for record in caplog.records] == ["broken of recipes"]


@pytest.mark.parametrize("text", ["[tool.poetry]\nname = 'other'\n", "[project]\nname = 'other'\n"])
def test_a_pyproject_of_another_project_is_not_read(
    install: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
):
    """Some distributions install their pyproject.toml into site-packages, next to ours."""
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.setattr(extensions, "PROJECT", tmp_path / "pyproject.toml")
    install("megatron-dit", metrics="mark = dit.errors:ConfigError")
    assert extensions.registered("metrics")["mark"] == "dit.errors:ConfigError"


def test_a_duplicate_name_is_refused(install: Callable[..., None], tmp_path: Path):
    install("taken", metrics="loss = dit.errors:ConfigError", features="letters = dit.errors:ConfigError")
    with pytest.raises(ConfigError, match=r"dit\.errors:ConfigError is registered as 'loss' of metrics"):
        evaluate.metrics()
    with pytest.raises(ConfigError, match=r"are both registered as 'letters' of megatron_dit\.features"):
        extensions.registered("features")
    install("again", recipes="again = again")
    (tmp_path / "again.py").write_text("@run.cli.factory(target=pretrain)\ndef tiny_dit(): ...\n")
    extensions.registered.cache_clear()
    with pytest.raises(ConfigError, match=r"recipes\.tiny and again both define tiny_dit; rename one of the two"):
        registry.entries()
