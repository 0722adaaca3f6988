"""What is printed of an error fits on a screen."""

import pytest

from dit.errors import LONGEST_MESSAGE, LONGEST_WORD, ConfigError, on_a_screen, one_line_errors


def test_long_words_alone_are_shortened():
    long, path = "9" * 10_000, "/" + "d" * (LONGEST_WORD - 2)
    assert on_a_screen(f"{path} is missing\nsee it") == f"{path} is missing\nsee it"
    shown = on_a_screen(f"x={long} must be 1")
    assert shown.endswith("...(10,002 characters) must be 1")
    assert len(shown) < LONGEST_WORD


def test_of_a_long_message_the_ends_are_left():
    shown = on_a_screen("the folder " + "x " * 5000 + "; restore it")
    assert shown.startswith("the folder x")
    assert shown.endswith("x ; restore it")
    assert len(shown) < LONGEST_MESSAGE + 40
    assert on_a_screen("x " * 900) == "x " * 900


def test_a_command_prints_an_error_on_a_screen(capsys: pytest.CaptureFixture[str]):
    @one_line_errors
    def command() -> int:
        raise ConfigError("y" * 9_999 + " is no setting")

    assert command() == 2
    assert len(capsys.readouterr().err) < LONGEST_WORD
