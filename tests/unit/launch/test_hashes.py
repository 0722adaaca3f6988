"""What `make` and the CPU image install: the versions of constraints.txt, by files whose hashes are in hashes.txt."""

import re
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}$")


def hashed() -> dict[str, tuple[Requirement, list[str]]]:
    """Return every requirement of hashes.txt with its hashes."""
    lines = [line for line in (ROOT / "hashes.txt").read_text().splitlines() if not line.startswith("#")]
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


def test_every_requirement_is_pinned_and_has_hashes() -> None:
    found = hashed()
    assert len(found) > 200
    for requirement, hashes in found.values():
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
        assert hashes, requirement
        assert all(HASH.fullmatch(one) for one in hashes), requirement


def test_the_versions_are_those_of_the_constraints() -> None:
    """Torch comes from an index of the user's choice; setuptools only builds."""
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


def test_nothing_else_is_downloaded_without_a_hash() -> None:
    """In both files: only torch and MkDocs may be; the project itself is installed without its dependencies."""
    for name in ("Makefile", "Dockerfile"):
        text = (ROOT / name).read_text().split("FROM ${BASE}")[0].replace("\\\n", "")
        lines = [line for line in re.split(r"&&|\n", text) if re.search(r"\$\(INSTALL\)|pip install", line)]
        commands = [line for line in lines if "INSTALL =" not in line and "sbom" not in line and "[docs]" not in line]
        assert [("--require-hashes" in c, "--no-deps" in c, c.rstrip().endswith(" torch")) for c in commands] == [
            (True, True, False),
            (False, False, True),
            (False, True, False),
        ], commands
