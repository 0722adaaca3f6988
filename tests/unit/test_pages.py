"""Pages: links, lists and navigation are complete, the API reference has docstrings, and every version is the same."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import dit
from tests.unit.launch.pages import MARKDOWN, ROOT

NAMES = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return what links may point to in a page: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", MARKDOWN, ids=str)
def test_the_links_of_a_page_exist(page):
    """Files, folders and headings of this repository."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, heading = target.partition("#")
        if "://" in target:
            continue
        found = (ROOT / page.parent / file).resolve() if file else ROOT / page
        assert found.exists(), f"{page}: {target}"
        assert not heading or heading in anchors(found.relative_to(ROOT)), f"{page}: {target}"


def test_every_page_of_docs_is_in_its_list():
    listed = re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs/README.md").read_text())
    assert {path.name for path in MARKDOWN if path.parts[0] == "docs"} - {"README.md"} <= set(listed)


def test_the_navigation_of_the_site_has_every_page():
    navigation = yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"], width=1000)
    pages = [page for page in MARKDOWN if page.parts[0] not in (".github", ".ci")]
    assert sorted(re.findall(r"\S+\.md$", navigation, re.MULTILINE)) == sorted(map(str, pages))


@pytest.mark.parametrize("name", NAMES)
def test_an_object_of_the_reference_has_a_docstring(name):
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute).__doc__


def test_the_site_is_built(tmp_path):
    pytest.importorskip("mkdocs_autorefs", reason="MkDocs is not installed; make docs installs and runs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PackedBatch" in (tmp_path / "docs" / "api.html").read_text()


def test_the_version_is_equal_in_every_place():
    """Package, citation and the newest heading of the changelog agree (CONTRIBUTING.md, Release)."""
    heading, note = re.search(r"^## (\S+)(?: \((.+)\))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    [cited] = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == dit.__version__
    assert heading == dit.__version__.removesuffix(".dev0")
    assert (note == "unreleased") == dit.__version__.endswith(".dev0")
    assert note == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", note)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "dit.__version__"}
