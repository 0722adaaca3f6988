"""`examples.race`: a run of a few steps writes a record, replays to the bit, and a false claim fails."""

import json
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from dit.errors import EXIT_CONFIG, EXIT_OK
from dit.monitoring.sinks import read_records
from examples.letters import reader as letter_reader
from examples.race import __main__ as race
from examples.race.record import Record, differences
from tests.integration import actions
from tests.integration.runs import TINY
from tests.support.ranks import call, run_jobs

STEPS = 3


@pytest.fixture(scope="module")
def words(letters_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a tiny run on a copy of the letters, with a reader next to them that was trained for 5 steps."""
    data = shutil.copytree(letters_data, tmp_path_factory.mktemp("race") / "letters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(letter_reader, "train_reader", partial(letter_reader.train_reader, num_steps=5))
        letter_reader.load_reader(data)
    tiny = {**TINY, "training.num_steps": STEPS, "sampling.num_steps": 2, "data.path": data}
    return [f"{key}={value}" for key, value in tiny.items()]


def trained(command: list[str], log: Path) -> tuple[float, float]:
    """Train as the race does, in a fork, because a new Python imports everything again; return false times."""
    words = command[command.index("launch.train") + 1 :]
    assert run_jobs(log.with_suffix(".fork"), {"train": call(actions.train, *words)})["train"].code == EXIT_OK
    return 1.0, 1.0


def judged(track: str, run: Path) -> tuple[int, int]:
    """Judge as the race does, in a fork."""
    words = ("--checkpoint", run, *race.TRACKS[track].judge, "--json")
    done = run_jobs(run.with_name(f"judge_{run.name}"), {"judge": call(actions.evaluate, *words)})["judge"]
    return race.TRACKS[track].count(json.loads(done.out.splitlines()[-1]))


@pytest.mark.long
def test_a_true_record_replays_bitwise_equal_and_a_false_one_does_not(tmp_path, words, capsys, monkeypatch):
    """The replay runs the commands of the race; the runs of the record are forks with the same numbers."""
    first, again = tmp_path / "first", tmp_path / "again"
    monkeypatch.setenv("DIT_DEVICE", "cpu")  # as in the forks
    with monkeypatch.context() as patch:
        patch.setattr(race, "trained", trained)
        patch.setattr(race, "judged", judged)
        assert race.main(["--ranks", "1", "--seeds", "2", "--out", str(first), *words]) == EXIT_OK
    record = Record.load(first / race.FILE)
    assert (record.steps, record.total, record.ranks) == (STEPS, 26 * 8, 1)
    assert list(record.right_by_seed) == ["1"]
    assert read_records(first / "run_1" / "metrics.jsonl")[-1]["step"] == STEPS
    assert len({tuple(race.losses_of(first / name)) for name in ("run", "run_1")}) == 2
    assert record.row() in capsys.readouterr().out

    # A false claim: losses and weights of another seed, and one more letter right.
    slow = 100 * record.process_s  # start-up times vary more than the time of a short run
    false = replace(record, losses_sha256="0" * 64, right=record.right + 1, process_s=slow)
    claim = tmp_path / "claim.json"
    claim.write_text(json.dumps(asdict(false)))
    assert race.main(["--check", str(claim), "--out", str(again)]) == race.EXIT_DIFFERS
    printed = capsys.readouterr().out
    assert "not confirmed" in printed
    assert [line.partition(":")[0] for line in printed.splitlines()[2:]] == ["losses_sha256", "right"]
    # All other fields equal those of the true record.
    replayed = Record.load(again / race.FILE)
    assert replayed.process_s > 1
    assert differences(replace(record, process_s=slow), replayed) == []


def test_settings_without_a_race_are_refused(tmp_path, words, capsys):
    out = ["--out", str(tmp_path / "out")]
    for overrides, message in (
        (["checkpoint.start_from=runs/other", *words], "checkpoint.start_from=runs/other is fixed in this race"),
        (["training.seed=3", *words], "training.seed=3 is fixed in this race"),
        (["data=mock"], "has no shards; prepare them"),
    ):
        assert race.main([*out, *overrides]) != EXIT_OK
        assert message in capsys.readouterr().err
    assert race.main(["--out", str(tmp_path), *words]) == EXIT_CONFIG
    assert "exists; give --out a folder that does not" in capsys.readouterr().err


def test_a_missing_record_is_refused(tmp_path, capsys):
    """tests/unit/examples/race/test_record.py refuses a record of an unknown revision."""
    assert race.main(["--check", str(tmp_path / "claim.json"), "--out", str(tmp_path / "out")]) != EXIT_OK
    assert "is not a record of this race" in capsys.readouterr().err
