"""500 random command lines, and 500 random damages of shards and checkpoints: success, or one screen with the cause.

A case that fails names its seed and number: `python -m tests.faults.fuzz KIND SEED NUMBER` repeats it.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.faults import fuzz, fuzz_overrides
from tests.support.ranks import rows

QUICK, CASES, BATCH = 40, 500, 100


def batches(count: int) -> Iterator[tuple[range]]:
    """Return the numbers of the cases, the first of which run with the quick tests."""
    yield (range(QUICK),)
    yield from ((range(*ends),) for ends in pairwise([QUICK, *range(BATCH, count + 1, BATCH)]))


def is_quick(numbers: range) -> bool:
    return numbers.start == 0


@pytest.mark.parametrize(("numbers",), rows(batches(CASES), is_quick), ids=str)
def test_a_random_command_line_is_planned_or_refused_by_name(numbers: range) -> None:
    found = fuzz.failures(fuzz_overrides.attempt, fuzz.SEED, numbers)
    assert not found, "\n".join(found)


class TestTheLaw:
    """What breaks it is seen."""

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
    def test_a_bad_end_is_seen(self, tmp_path: Path, program: str, wrong: str) -> None:
        def main(words: object) -> int:
            scope = {"folder": tmp_path, "code": 0}
            exec(f"import sys\n{program}", scope)
            return int(str(scope["code"]))

        ended = fuzz.run(main, [], tmp_path)
        fuzz.judge(ended, tmp_path, codes=(2,), causes=("x",))
        assert wrong in "; ".join(ended.wrong)

    def test_a_good_end_passes(self, tmp_path: Path) -> None:
        for code in (0, 2):
            ended = fuzz.Ended(code, "", "error: x is wrong\n" if code else "")
            fuzz.judge(ended, tmp_path, codes=(2,), causes=("x",))
            assert not ended.wrong

    def test_a_call_without_end_is_ended(self) -> None:
        with pytest.raises(fuzz.Hang), fuzz.ending_within(1):
            while True:
                pass
