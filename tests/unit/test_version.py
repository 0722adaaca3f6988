"""The version of the package, the citation and the newest heading of the changelog agree (CONTRIBUTING.md, Release)."""

import re
import tomllib
from pathlib import Path

import dit

ROOT = Path(__file__).parents[2]


def test_the_version_is_equal_in_every_place():
    heading, note = re.search(r"^## (\S+)(?: \((.+)\))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    [cited] = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == dit.__version__
    assert heading == dit.__version__.removesuffix(".dev0")
    assert (note == "unreleased") == dit.__version__.endswith(".dev0")
    assert note == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", note)


def test_pyproject_reads_the_version_of_the_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "dit.__version__"}
