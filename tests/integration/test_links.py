"""A run never writes outside of its folder through a link: a resumed run refuses links or replaces them."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration import actions
from tests.integration.runs import mock
from tests.support.ranks import Job, call, run_jobs

CONTENT = "a file that no run may change\n"
REPLACED = ["heartbeats/rank_0.json", "heartbeats/rank_0.part", "profile/rank_0.json.gz"]
"""Links with these names are replaced."""
REFUSED = ["stacks/rank_0.txt", "samples/step_0000006"]
"""Links below the top of the folder that end the run; at the top, every link does."""


def resumed_with_links(run_dir: Path, names: list[str], arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Resume the run with links to other files or folders at `names`; restore the run folder afterwards."""
    folders = {name: (run_dir / name).is_dir() for name in names}
    for number, (name, is_folder) in enumerate(folders.items()):
        place, victim = run_dir / name, run_dir.parent / f"victim {number}"
        victim.mkdir() if is_folder else victim.write_text(CONTENT)
        if os.path.lexists(place):
            place.rename(run_dir.parent / f"original {number}")
        place.symlink_to(victim)
    ended, results = actions.train(arguments), {}
    for number, (name, is_folder) in enumerate(folders.items()):
        place, victim, original = run_dir / name, *(run_dir.parent / f"{x} {number}" for x in ("victim", "original"))
        after = sorted(victim.rglob("*")) if is_folder else victim.read_text()
        place.unlink(missing_ok=True)
        if original.exists():
            original.rename(place)
        victim.rmdir() if is_folder else victim.unlink()
        results[name] = {"ended": ended, "unchanged": after == ([] if is_folder else CONTENT), "place": place}
    return results


def every_name(run_dir: Path, arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Resume with a link in place of each entry of the run folder, except `checkpoints`."""
    names = sorted(path.name for path in run_dir.iterdir() if path.name != "checkpoints")
    return {name: resumed_with_links(run_dir, [name], arguments)[name] for name in names}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("links")
    settings: dict[str, Any] = {
        "training__log_interval": 1,
        "training__sample_interval": 2,
        "sampling__num_steps": 1,
        "schedule__warmup_steps": 0,
        "logging__tensorboard": True,
        "logging__profile_steps": "[1,9]",
    }
    first = mock(folder / "run", **settings, training__num_steps=2)
    jobs = {
        "first": call(actions.train, *first),
        "top": Job(every_name, {"run_dir": folder / "run", "arguments": first}),
    }
    for number, names in enumerate([*([name] for name in REFUSED), REPLACED]):  # each job trains two more steps
        arguments = mock(folder / "run", **settings, training__num_steps=4 + 2 * number)
        jobs[names[0]] = Job(resumed_with_links, {"run_dir": folder / "run", "names": names, "arguments": arguments})
    saved, scratch = folder / "run" / "checkpoints", folder / "scratch"
    jobs["move"] = Job(shutil.move, {"src": saved, "dst": scratch})
    jobs["link"] = Job(Path.symlink_to, {"self": saved, "target": scratch})
    last = mock(folder / "run", **settings, training__num_steps=6 + 2 * number)
    jobs["linked checkpoints"] = call(actions.train, *last)
    done = run_jobs(folder / "world", jobs)
    linked = {name: result for first in (*REFUSED, REPLACED[0]) for name, result in done[first].items()}
    return {**done, **linked, "scratch": sorted(path.name for path in scratch.iterdir())}


def test_every_entry_of_a_run_folder_is_refused_as_a_link(done: dict[str, Any]) -> None:
    """The message names the link and the solution; the target of the link is not changed."""
    assert done["first"].code == 0, done["first"].err
    assert {"run.lock", "metrics.jsonl", "heartbeats", "stacks", "samples", "profile", "events"} <= done["top"].keys()
    for name, result in done["top"].items():
        assert result["unchanged"], name
        assert result["ended"].code == 2, (name, result["ended"].err)
        assert f"{result['place']} is a link" in result["ended"].err
        assert "delete the link" in result["ended"].err


@pytest.mark.parametrize("name", REFUSED)
def test_links_in_subfolders_are_refused(done: dict[str, Any], name: str) -> None:
    result = done[name]
    assert (result["unchanged"], result["ended"].code) == (True, 2), result["ended"].err
    assert f"{result['place']} is a link" in result["ended"].err


@pytest.mark.parametrize("name", REPLACED)
def test_other_links_are_replaced(done: dict[str, Any], name: str) -> None:
    result = done[name]
    assert (result["unchanged"], result["ended"].code) == (True, 0), result["ended"].err


def test_checkpoints_may_be_a_link_to_another_disk(done: dict[str, Any]) -> None:
    ended = done["linked checkpoints"]
    assert ended.code == 0, ended.err
    assert "resumed at step 8" in ended.out
    assert done["scratch"][-1] == "iter_0000010"
