"""Console lines about dropped samples."""

from collections import Counter

from dit.data_api import SampleCounts
from dit.training.drops import DropReport

LONG = {"too_long": "sample 'k' in shard 's': too_long: 2048 tokens with padding, at most 1024 fit"}


def counts(images: int, **dropped_clips: int) -> SampleCounts:
    return SampleCounts(Counter(image=images), Counter({(r, "clip"): n for r, n in dropped_clips.items()}), LONG)


def test_the_first_drop_of_a_reason_and_each_doubling_are_printed() -> None:
    report = DropReport()
    printed = [n for n in range(1, 41) if report.lines(counts(100, too_long=n))]
    assert printed == [1, 2, 4, 8, 16, 32]
    (line,) = report.lines(counts(100, too_long=40, seconds=1))
    assert "seconds" in line


def test_a_line_has_counts_the_first_sample_and_a_note_if_all_clips_are_dropped() -> None:
    """A share of the read samples would be wrong: samples in buffers were read and are not used yet."""
    dropped = "96 samples dropped so far, while reading ahead of the"
    (line,) = DropReport().lines(counts(150, too_long=96))
    assert line == f"{dropped} 150 samples used, {LONG['too_long']}; no clip was used, all 96 were dropped"
    some = counts(150, too_long=96)
    some.used["clip"] = 1
    (line,) = DropReport().lines(some)
    assert line == f"{dropped} 151 samples used, {LONG['too_long']}"


def test_the_sum_over_ranks_keeps_an_example_of_every_reason() -> None:
    other = SampleCounts(Counter(clip=2), Counter({("seconds", "clip"): 3}), {"seconds": "a sample of 9 s"})
    total = counts(5, too_long=1) + other
    assert total.used == {"image": 5, "clip": 2}
    assert total.by_reason() == {"seconds": 3, "too_long": 1}
    assert total.examples == {**LONG, "seconds": "a sample of 9 s"}
