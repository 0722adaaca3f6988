"""Commands end with a one-line error, or silently if the reader of their output has ended."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
import torch

from dit.backends.device import explained_out_of_memory
from dit.errors import (
    DISK_ERRORS,
    EXIT_BROKEN_PIPE,
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_TRACEBACK,
    LONGEST_MESSAGE,
    LONGEST_WORD,
    ConfigError,
    DeviceMemoryError,
    name_root_cause,
    on_a_screen,
    one_line_errors,
)
from dit.terminal import printable


def test_only_long_words_are_shortened():
    long, path = "9" * 10_000, "/" + "d" * (LONGEST_WORD - 2)
    assert on_a_screen(f"{path} is missing\nsee it") == f"{path} is missing\nsee it"
    shown = on_a_screen(f"x={long} must be 1")
    assert shown.endswith("...(10,002 characters) must be 1")
    assert len(shown) < LONGEST_WORD


def test_a_long_message_keeps_its_ends():
    shown = on_a_screen("the folder " + "x " * 5000 + "; restore it")
    assert shown.startswith("the folder x")
    assert shown.endswith("x ; restore it")
    assert len(shown) < LONGEST_MESSAGE + 40
    assert on_a_screen("x " * 900) == "x " * 900


def raised(error: BaseException) -> int:
    """Return the exit code of a command that raises `error`."""

    @one_line_errors
    def command() -> int:
        raise error

    return command()


def test_an_error_is_printed_short_and_without_control_characters(capsys: pytest.CaptureFixture[str]):
    assert raised(ConfigError("y" * 9_999 + " \x1b[2J\x9b31m\u202e is no setting")) == EXIT_CONFIG
    printed = capsys.readouterr().err
    assert printed.endswith(" ?[2J?31m? is no setting\n")
    assert len(printed) < LONGEST_WORD + 20


@pytest.mark.parametrize("number", DISK_ERRORS)
def test_a_full_or_read_only_disk_is_reported_in_one_line_with_the_file_and_the_cure(
    capsys: pytest.CaptureFixture[str], number: int
):
    assert raised(OSError(number, os.strerror(number), "data/mine")) == EXIT_CONFIG
    assert capsys.readouterr().err == f"error: data/mine: {os.strerror(number)}; {DISK_ERRORS[number]}\n"
    assert raised(OSError(number, os.strerror(number))) == EXIT_CONFIG
    assert capsys.readouterr().err == f"error: {os.strerror(number)}; {DISK_ERRORS[number]}\n"


def test_ctrl_c_prints_one_word_and_other_errors_keep_their_traceback(capsys: pytest.CaptureFixture[str]):
    assert raised(KeyboardInterrupt()) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
    for error in (OSError(errno.EBADF, "not allowed \x1b[2J"), KeyError("not allowed"), RuntimeError("\x1b]0;a\x07")):
        assert raised(error) == EXIT_TRACEBACK
        printed = capsys.readouterr().err
        assert printed.startswith("Traceback (most recent call last)")
        assert printed.endswith(f"{type(error).__name__}: {printable(str(error))}\n")
        assert "\x1b" not in printed


def test_the_report_of_torchrun_has_no_control_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    name_root_cause("unexpected error KeyError: '\x1b[2J'")
    assert json.loads(report.read_text())["message"]["message"] == "unexpected error KeyError: '?[2J'"


LONG_OUTPUT = """
from dit.errors import one_line_errors

@one_line_errors
def main():
    for _ in range(9999):
        print("x" * 99)

raise SystemExit(main())
"""


COMMANDS = [("-m", "launch.train", "--list"), ("-c", LONG_OUTPUT)]


def ended(command: tuple[str, ...], output: IO[bytes]) -> "subprocess.CompletedProcess[str]":
    """Run a command with its stdout in a file."""
    process, root = [sys.executable, *command], Path(__file__).parents[2]
    return subprocess.run(process, stdout=output, stderr=subprocess.PIPE, text=True, cwd=root, timeout=120)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_at_the_end_of_the_output_is_reported_in_one_line(command: tuple[str, ...]):
    with open("/dev/full", "wb") as full:
        process = ended(command, full)
    assert process.stderr == f"error: {os.strerror(errno.ENOSPC)}; {DISK_ERRORS[errno.ENOSPC]}\n"
    assert process.returncode == EXIT_CONFIG


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_ends_early_ends_the_command_silently(command: tuple[str, ...]):
    """As with `| head`. Outputs smaller than a buffer are only written when the command ends."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        process = ended(command, output)
    assert process.stderr == ""
    assert process.returncode == EXIT_BROKEN_PIPE


SIZES = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1 GiB is free"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError(f"{SIZES}. If reserved but unallocated memory is large try setting X=Y"), SIZES),
        (RuntimeError("NCCL error\nCuda failure 2 'out of memory'"), "NCCL error\nCuda failure 2 'out of memory'"),
    ],
)
def test_an_error_of_a_full_gpu_has_sizes_and_cure(error: RuntimeError, message: str):
    with pytest.raises(DeviceMemoryError) as raised, explained_out_of_memory():
        raise error
    assert str(raised.value).startswith(f"{message}; lower training.micro_batch_size or ")
    with pytest.raises(RuntimeError, match="of another kind"), explained_out_of_memory():
        raise RuntimeError("of another kind")
