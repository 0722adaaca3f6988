"""File names, class names, settings, errors and log messages from strangers are printed without control sequences."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from dit.terminal import echo, log_to_stderr, printable, progress
from energon_data.inspect import main as inspect
from energon_data.prepare.__main__ import main as prepare
from launch.train import main as train
from tests.support.repository import REPOSITORY

ATTACK = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
"""Set the title, clear the screen, change the colour, reverse the direction of writing."""


def is_safe(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def test_only_visible_characters_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("line\n\tÄ 漢字 🙂") == "line\n\tÄ 漢字 🙂"
    assert printable(f"a{ATTACK}b\r\udcff\u2028c") == "a?]0;title??[2J?31m?b ? c"
    assert printable("two\nlines", allowed="") == "two lines"
    echo("a\x1b", 1, Path("b\x07"), sep="\n")
    assert capsys.readouterr().out == "a?\n1\nb?\n"


@pytest.mark.parametrize(
    ("terminal", "expected"),
    [(True, "\r\x1b[Kfirst ?[2J\r\x1b[K" + 79 * "x" + "\n"), (False, f"first ?[2J\n{100 * 'x'}\n")],
)
def test_progress_rewrites_one_line_of_a_terminal(
    terminal: bool, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress() as show:
        show("first \x1b[2J")
        show(100 * "x")
    assert capsys.readouterr().err == expected


def test_the_log_is_printed_without_control_characters() -> None:
    """In a separate process, because pytest captures the log of this one."""
    program = (
        "import logging; from dit.terminal import log_to_stderr; log_to_stderr()\n"
        "logging.getLogger('any').warning('a %s', '\\x1b[2J')\n"
        "try: raise ValueError('\\x1b[2J')\n"
        "except ValueError: logging.getLogger('any').exception('b')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("a ?[2J\nb\nTraceback")
    assert done.stderr.endswith("ValueError: ?[2J\n")


@pytest.fixture
def root_log() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    yield root
    root.handlers[:] = handlers


def test_a_log_with_a_destination_keeps_it(root_log: logging.Logger) -> None:
    before = root_log.handlers[:]
    log_to_stderr()
    assert root_log.handlers == before


def pictures(folder: Path) -> Path:
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 0, 0)).save(folder / f"{ATTACK}{number}.png".replace("\x9b", ""))
    (folder / f"broken{ATTACK}.png").write_bytes(b"no picture")
    return folder


def test_control_characters_in_file_names_and_data_sets_are_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--in", str(pictures(tmp_path / "in")), "--out", str(out), "--size", "32", "--processes", "1"]
    assert prepare(["images", *words]) == 0
    shown = "".join(capsys.readouterr())
    assert "broken?]0;title" in shown
    assert is_safe(shown)
    described = json.loads((out / "dataset.json").read_text())
    described |= {"class_names": [ATTACK], "text_encoder": ATTACK, "latent_shape": ATTACK}
    (out / "dataset.json").write_text(json.dumps(described))
    inspect([str(out)])
    shown = "".join(capsys.readouterr())
    assert "?]0;title" in shown
    assert is_safe(shown)


@pytest.mark.parametrize(
    "words",
    [
        lambda file: ["--yes", "--factory", "tiny_dit", f"training.run_dir{ATTACK}=x"],
        lambda file: ["--yes", "--factory", "tiny_dit", f"training.num_steps={ATTACK}"],
        lambda file: ["--yes", "--yaml", file('{"_target_": "pretrain", "model\\e[2J": 1}')],
        lambda file: ["--yes", "--yaml", file('{"_target_": "pretrain", "model": "\\e[2J"}')],
    ],
    ids=["name of an override", "value of an override", "name in --yaml", "value in --yaml"],
)
def test_control_characters_in_settings_are_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Callable[[Callable[[str], str]], list[str]]
) -> None:
    def file(text: str) -> str:
        (tmp_path / "settings.yaml").write_text(text)
        return str(tmp_path / "settings.yaml")

    assert train(words(file)) == 2
    shown = "".join(capsys.readouterr())
    assert "error: " in shown
    assert is_safe(shown)
