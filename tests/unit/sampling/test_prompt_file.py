"""Prompt files: their content, and errors for invalid lines."""

from pathlib import Path

import pytest

from dit.errors import ConfigError
from dit.sampling.prompt_file import Prompt, read_prompts


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text('a cat\n\n  a "red" dog, größer \n')
    assert read_prompts(tmp_path / "x.txt") == [Prompt("a cat"), Prompt('a "red" dog, größer')]


def test_an_object_per_line_may_have_a_negative_and_a_seed(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "seed": 0}\n{"prompt": "b", "negative": "c", "seed": null}\n')
    assert read_prompts(tmp_path / "x.jsonl") == [Prompt("a", None, 0), Prompt("b", "c", None)]


def test_only_line_feeds_end_a_prompt_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    """Unicode has further line separators, which JSON may contain."""
    (tmp_path / "x.txt").write_bytes("a cat\x85 on a\u2028mat\r\na dog\n".encode("utf-8-sig"))
    assert read_prompts(tmp_path / "x.txt") == [Prompt("a cat\x85 on a\u2028mat"), Prompt("a dog")]
    (tmp_path / "x.jsonl").write_bytes('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}'.encode("utf-8-sig"))
    assert read_prompts(tmp_path / "x.jsonl") == [Prompt("a\u2028b"), Prompt("c")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a cat", "line 2 is not JSON"),
        ('["a"]', "line 2 is not an object with a 'prompt'"),
        ('{"prompt": "a", "sed": 1}', "line 2 has a field 'sed'; the fields are prompt, negative, seed"),
        ('{"prompt": "a", "seed": 1.5}', "line 2: seed is 1.5, expected int"),
        ('{"prompt": "a", "seed": true}', "line 2: seed is True"),
        ('{"prompt": "a", "seed": -1}', "line 2: seed -1 is outside 0 to"),
        ('{"prompt": null}', "line 2: prompt is None, expected str"),
        ('{"prompt": "a", "crop": 3}', "line 2: crop is 3, expected list"),
        ('{"prompt": "a", "crop": [3]}', "line 2: crop is .3., expected two integers in pixels"),
        ('{"prompt": "a", "original_size": [3, -1]}', "line 2: original_size is .3, -1., expected two"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        read_prompts(tmp_path / "x.jsonl")


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("\n")
    for path, message in ((tmp_path / "x.txt", "has no prompt"), (tmp_path / "y.txt", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            read_prompts(path)
