"""The documentation site: its API reference names public objects, and its navigation has every page."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
NAMES = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_an_object_of_the_reference_has_a_docstring(name):
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute).__doc__


def test_the_navigation_has_every_page():
    found: list[str] = []

    def collect(node):
        found.extend([node] if isinstance(node, str) else [])
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            collect(child)

    collect(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    folders = ("docs", "dit", "energon_data", "launch", "recipes", "tests", "benchmarks", "examples")
    pages = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]
    assert sorted(found) == sorted(str(page.relative_to(ROOT)) for page in pages)


def test_the_site_is_built(tmp_path):
    pytest.importorskip("mkdocs_autorefs", reason="MkDocs is not installed; make docs installs and runs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PackedBatch" in (tmp_path / "docs" / "api.html").read_text()
