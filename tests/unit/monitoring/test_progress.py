"""Lines on the console of a run."""

import io

import pytest

from dit.monitoring.progress import ConsoleProgress, format_duration, format_progress

VALUES = {
    "loss": 0.12345,
    "grad_norm": 1.5,
    "learning_rate": 3e-4,
    "samples_per_s": 1234.5,
    "tokens_per_s": 1e6,
    "tflops_per_rank": 412.25,
    "unknown": 1.0,
}
LINE = (
    "step  30/100  loss 0.1235  grad norm 1.5  lr 0.0003  samples/s 1,234.5  tokens/s 1,000,000  TFLOPS/rank 412.2"
    "  ETA 2m20s"
)


class Clock:
    """A clock that advances two seconds per step."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def run(stream):
    clock = Clock()
    progress = ConsoleProgress("DiT-S, 33 M parameters, 2 ranks", 100, stream, clock)
    clock.now += 500  # building takes time and is no step
    progress.start(10)
    for step in (20, 30):
        clock.now += 20
        progress.update(step, VALUES)
    progress.message("checkpoint of step 30")
    return stream.getvalue()


def test_a_line_has_the_share_of_waiting_for_data():
    waits = {"loss": 1.0, "data_wait_share": 0.123, "loader_samples_per_s": 3104.2}
    line = "step 3/9  loss 1.0000  waited 12% for data (the loader makes 3,104 samples/s)  ETA 2s"
    assert format_progress(3, 9, waits, 2.0) == line
    assert format_progress(3, 9, {**waits, "data_wait_share": 0.04}, 2.0) == "step 3/9  loss 1.0000  ETA 2s"


def test_the_console_has_plain_lines():
    """One header, one line per interval, no control codes; the remaining time only counts training steps."""
    lines = run(io.StringIO()).splitlines()
    assert lines == [
        "DiT-S, 33 M parameters, 2 ranks",
        LINE.replace("30/100", "20/100").replace("2m20s", "2m40s"),
        LINE,
        "checkpoint of step 30",
    ]


def test_missing_quantities_are_omitted():
    assert format_progress(1, 10, {"loss": float("nan")}, None) == "step  1/10  loss nan"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (7620, "2h07m"),
        (86400 * 4 + 3 * 3600, "4d03h"),
        (-3, "0s"),
    ],
)
def test_durations_are_formatted(seconds, text):
    assert format_duration(seconds) == text


def test_control_characters_in_names_are_removed():
    """Messages contain names of samples, which come from the data."""
    progress = ConsoleProgress("header \x1b]0;a\x07", 10, stream := io.StringIO(), Clock())
    progress.message("dropped sample 'k\x1b[2J\x1b]0;evil'")
    text = stream.getvalue()
    assert "dropped sample 'k?[2J?]0;evil'" in text
    assert "header ?]0;a?" in text
    assert "\x1b[2J" not in text
    assert "\x1b]0;" not in text
