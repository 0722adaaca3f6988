"""A record of the race is refused if any of its claims is false."""

import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dit.errors import ConfigError
from examples.race.__main__ import check_at, trained
from examples.race.record import (
    FOLDER,
    PAGE,
    SLOWER,
    TRACKS,
    Record,
    attributes_of_new_pairs,
    differences,
    page,
    records,
)

PR_GET_CHILD_SUBREAPER = 37  # of Linux's prctl
TRUE = Record(
    track="letters",
    change="",
    factory="letters_dit",
    overrides=[],
    ranks=2,
    revision="0" * 12,
    process_s=100.0,
    wall_s=60.0,
    steps=2100,
    data_sha256="d",
    judge_sha256="r",
    losses_sha256="l",
    weights_sha256="w",
    right=195,
    total=208,
    right_by_seed={},
    machine="2 cores of one",
    torch="2",
)


@pytest.mark.parametrize(
    ("name", "claimed"),
    [("total", 195), ("steps", 10), ("right", 208), ("weights_sha256", "x")],
)
def test_every_false_claim_is_named(name, claimed):
    assert differences(TRUE, TRUE) == []
    (line,) = differences(replace(TRUE, **{name: claimed}), TRUE)
    assert line.startswith(f"{name}: claimed {claimed}, measured {getattr(TRUE, name)}: ")


def test_a_row_counts_the_seeds_that_reach_the_mark():
    record = replace(TRUE, right=208, right_by_seed={"1": 187, "2": 188, "3": 208})
    assert record.row().endswith("| 89.9 to 100.0 % |")
    assert record.seeds_at_mark == "3 of 4"


def test_a_time_not_reproduced_on_the_same_machine_is_refused():
    """Other work on the machine changes the process time a little; times of another machine are not compared."""
    claimed = replace(TRUE, process_s=1.0)
    (line,) = differences(claimed, TRUE)
    assert line.startswith("process_s: claimed 1 s, measured 100 s: ")
    assert differences(claimed, replace(TRUE, machine="2 cores of another")) == []
    assert differences(replace(TRUE, process_s=900.0), TRUE) == []
    assert differences(TRUE, replace(TRUE, process_s=0.99 * SLOWER * TRUE.process_s)) == []
    assert len(differences(TRUE, replace(TRUE, process_s=1.01 * SLOWER * TRUE.process_s))) == 1


def test_time_of_a_process_that_outlives_the_training_counts(tmp_path):
    busy = "import time\nwhile time.process_time() < 1: pass"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {busy!r}])"]
    seconds, _ = trained(command, tmp_path / "log")
    assert seconds > 1
    adopts = ctypes.c_int(1)
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts))
    assert adopts.value == 0, "this process would adopt the orphans of later tests and never wait for them"


def test_a_record_is_checked_with_the_code_of_its_revision(tmp_path, monkeypatch):
    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.chdir(tmp_path)
    command = tmp_path / "examples" / "race.py"
    for folder in (command.parent, tmp_path / "data"):
        folder.mkdir()
    (tmp_path / "data" / "shard").write_text("data")
    git("init", "--quiet")
    for code in (
        "import sys; open(sys.argv[4], 'w').write(sys.argv[2] + open('data/shard').read()); exit(1)",
        "exit(0)",
    ):
        command.write_text(code)
        git("add", "examples")
        git("commit", "--quiet", "--message", code)
    record = Path("record.json")
    assert check_at(git("rev-parse", "HEAD~1"), tmp_path, record, Path("out")) == 1
    assert (tmp_path / "out").read_text() == f"{tmp_path / record}data"
    assert (tmp_path / "data" / "shard").exists()
    assert len(git("worktree", "list").splitlines()) == 1
    with pytest.raises(ConfigError, match=r"revision 0123456789ab, which .*--unshallow"):
        check_at("0123456789ab", tmp_path, record, Path("out"))


def test_avatars_count_the_attributes_of_new_pairs():
    by_attribute = dict.fromkeys(("skin", "hair", "shirt"), 0.0)
    scores = [
        {"kind": kind, "samples": 100, "attributes": share, "by_attribute": by_attribute}
        for kind, share in (("trained", 1.0), ("new combination", 0.99), ("new pair", 0.98))
    ]
    assert attributes_of_new_pairs({"scores": scores}) == (294, 300)


def test_every_record_reaches_the_mark_with_each_seed_and_is_faster_than_the_one_before():
    for track in TRACKS:
        rows = records(track)
        assert rows, f"{FOLDER / track} has no records"
        assert [row.track for row in rows] == [track] * len(rows)
        assert [row.seeds_at_mark for row in rows] == ["5 of 5"] * len(rows)
        times = [row.process_s for row in rows]
        assert times == sorted(times, reverse=True)


def test_the_page_lists_the_records():
    assert PAGE.read_text() == page()
