"""Packages that `make` and the CPU image install: versions of constraints.txt, files with the hashes of hashes.txt.

hashes-docs.txt has the additional packages of `make docs`.
"""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}$")


def hashed(file: str = "hashes.txt") -> dict[str, tuple[Requirement, list[str]]]:
    """Return every requirement of a file with its hashes."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    found = {}
    for entry in "\n".join(lines).replace(" \\\n", "\n").split("\n"):
        if not entry.startswith(" "):
            requirement, hashes = Requirement(entry), []
            found[requirement.name.lower()] = requirement, hashes
        else:
            hashes.append(entry.strip())
    return found


def pinned() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize(("file", "least"), [("hashes.txt", 200), ("hashes-docs.txt", 10)])
def test_every_requirement_is_pinned_and_has_hashes(file: str, least: int) -> None:
    found = hashed(file)
    assert len(found) > least
    for requirement, hashes in found.values():
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
        assert hashes, requirement
        assert all(HASH.fullmatch(one) for one in hashes), requirement


def test_every_package_of_the_docs_has_a_hash() -> None:
    """hashes-docs.txt has every package that `make docs` needs, and none that hashes.txt has for every platform."""
    everywhere = {name for name, (r, _) in hashed().items() if "sys_platform" not in str(r.marker)}
    assert not everywhere & hashed("hashes-docs.txt").keys()
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {Requirement(text).name.lower() for text in metadata["docs"]}
    assert needed <= hashed("hashes-docs.txt").keys()


def test_the_versions_are_those_of_the_constraints() -> None:
    """Torch comes from an index that the user selects; setuptools is needed only for builds."""
    found = {name: str(requirement.specifier)[2:] for name, (requirement, _) in hashed().items()}
    here = {
        name for name, (r, _) in hashed().items() if r.marker is None or r.marker.evaluate(dict(default_environment()))
    }
    wanted = pinned()
    assert wanted.keys() - found.keys() == {"torch"}
    assert here - wanted.keys() == {"setuptools"}
    assert {name: found[name] for name in wanted.keys() & found.keys()} == {
        name: version for name, version in wanted.items() if name != "torch"
    }


def test_every_download_has_a_hash() -> None:
    """Everything else is a wheel with a hash, except this project, which is installed without its dependencies."""
    for name in ("Makefile", "Dockerfile"):
        text = (ROOT / name).read_text().split("FROM ${BASE}")[0].replace("\\\n", "")
        lines = [line for line in re.split(r"&&|\n", text) if re.search(r"\$\(INSTALL\)|pip install", line)]
        commands = [line for line in lines if "INSTALL =" not in line and "sbom" not in line]
        flags = ("--require-hashes --only-binary :all:", "--no-deps")
        assert [(*(flag in c for flag in flags), c.rstrip().endswith(" torch")) for c in commands] == [
            (True, True, False),
            (False, False, True),
            (False, True, False),
            *([(True, True, False)] if name == "Makefile" else []),
        ], commands
