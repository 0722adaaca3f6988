"""500 random command lines and 500 randomly damaged data sets and checkpoints: success, or one screen with the cause.

The message of a failed case has its seed and number; `python -m tests.faults.fuzz KIND SEED NUMBER` repeats it.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from tests.faults import fuzz, fuzz_checkpoints, fuzz_overrides, fuzz_shards
from tests.support.ranks import rows

QUICK, CASES, BATCH = 40, 500, 100


def batches(count: int) -> Iterator[tuple[range]]:
    """Yield the numbers of the cases in batches; the first batch runs with the quick tests."""
    yield (range(QUICK),)
    yield from ((range(*ends),) for ends in pairwise([QUICK, *range(BATCH, count + 1, BATCH)]))


def is_quick(numbers: range) -> bool:
    return numbers.start == 0


OVERRIDES = rows(batches(CASES), is_quick)
DAMAGES = rows(batches(CASES // 2), is_quick)


@pytest.mark.parametrize("numbers", OVERRIDES, ids=str)
def test_a_random_command_line_is_planned_or_refused_by_name(numbers: range) -> None:
    found = fuzz.failures(fuzz_overrides.attempt, fuzz.SEED, numbers)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("numbers", DAMAGES, ids=str)
def test_a_damaged_data_set_is_read_unchanged_or_refused_by_name(numbers: range) -> None:
    found = fuzz.failures(fuzz_shards.attempt, fuzz.SEED, numbers)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("numbers", DAMAGES, ids=str)
def test_a_damaged_run_resumes_unchanged_or_is_refused_by_name(numbers: range) -> None:
    found = fuzz.failures(fuzz_checkpoints.attempt, fuzz.SEED, numbers)
    assert not found, "\n".join(found)


class TestTheLaw:
    """`run` and `judge` detect violations."""

    @pytest.mark.parametrize(
        ("program", "wrong"),
        [
            ("raise KeyError('x')", "escapes"),
            ("sys.exit(2)", "escapes"),
            ("print('Traceback', file=sys.stderr); code = 2", "a traceback"),
            ("print('error: x' * 999, file=sys.stderr); code = 2", "more than a screen"),
            ("print('error: x\\n' * 99, file=sys.stderr); code = 2", "more than a screen"),
            ("print('error: y', file=sys.stderr); code = 2", "is named"),
            ("print('bad x', file=sys.stderr); code = 2", "no line says error"),
            ("print('error: x', file=sys.stderr); code = 70", "exit code 70"),
            ("(folder / 'deep').mkdir(); (folder / 'deep' / 'sprung').touch()", "code was run"),
            ("print('\\udcff')", "escapes"),
        ],
    )
    def test_a_wrong_ending_is_reported(self, tmp_path: Path, program: str, wrong: str) -> None:
        def main(words: object) -> int:
            scope = {"folder": tmp_path, "code": 0}
            exec(f"import sys\n{program}", scope)
            return int(str(scope["code"]))

        ended = fuzz.run(main, [], tmp_path)
        fuzz.judge(ended, tmp_path, codes=(2,), causes=("x",))
        assert wrong in "; ".join(ended.wrong)

    def test_a_correct_ending_passes(self, tmp_path: Path) -> None:
        for code in (0, 2):
            ended = fuzz.Ended(code, "", "error: x is wrong\n" if code else "")
            fuzz.judge(ended, tmp_path, codes=(2,), causes=("x",))
            assert not ended.wrong

    def test_an_endless_call_is_stopped(self, tmp_path: Path) -> None:
        def main(words: object) -> int:
            while True:
                pass

        with mock.patch.object(fuzz, "HANGS_AFTER_S", 1):
            assert fuzz.run(main, [], tmp_path).wrong == ["no end after 1 s"]
