"""Slow commands announce their work before it starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from dit.encoders.pretrained import load_network
from dit.terminal import announce

MOST_CPU_S = 5.0  # until the first line; nemo-run takes most of it: 2 s on a quiet core, 3.2 s on a shared one
STOPPED_AT_TORCH = """
import os, runpy, sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch is imported after", time.process_time(), "s", file=sys.stderr, flush=True)
            os._exit(0)

sys.meta_path.insert(0, Slow())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Ends a command where its first slow import would start."""


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("launch.train --factory tiny_dit --dryrun", "tiny_dit: importing torch and Megatron-Core"),
        (
            "energon_data.prepare images --in {folder} --out {folder}/made --size 16",
            "preparing {folder}/made from {folder}",
        ),
    ],
)
def test_a_command_prints_its_task_before_slow_imports(command: str, line: str, tmp_path: Path) -> None:
    words = command.format(folder=tmp_path).split()
    done = subprocess.run([sys.executable, "-c", STOPPED_AT_TORCH, *words], capture_output=True, text=True, check=False)
    first, second = done.stderr.splitlines()
    assert first == line.format(folder=tmp_path)
    assert float(second.split()[-2]) < MOST_CPU_S


@pytest.mark.parametrize(("name", "place"), [("{folder}", "folder {folder}"), ("a/b", "the Hugging Face hub: a/b")])
def test_an_encoder_is_named_before_it_is_loaded(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    class Network:
        @classmethod
        def from_pretrained(cls, **options: object) -> None:
            assert capsys.readouterr().err == f"loading autoencoder 'x' from {place.format(folder=tmp_path)}\n"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_network(Network, "autoencoder 'x'", pretrained_model_name_or_path=name.format(folder=tmp_path))


@pytest.mark.parametrize(("rank", "lines"), [(None, 1), ("0", 1), ("1", 0)])
def test_one_rank_prints_announcements(rank: str | None, lines: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    announce("this")
    assert capsys.readouterr().err == "this\n" * lines
