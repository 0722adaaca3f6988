"""The words of the code: terms of the field, in place of the private words that were replaced by them."""

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("dit", "recipes", "energon_data", "launch", "benchmarks", "tests")
REPLACED = {
    r"told": "conditioned on, given, reported",
    r"held(?![- _]out)": "local, allocated, replicated",
    r"dear": "expensive",
    r"twins?": "equivalence run, tiny form",
    r"made[- ]up": "synthetic",
    r"proven": "verified",
}
"""Private words, by the terms that replace them. Only words without a use of their own in this project are listed."""
ANY = re.compile(rf"\b({'|'.join(REPLACED)})\b", re.IGNORECASE)
PROSE = (tokenize.COMMENT, tokenize.STRING)


def uses(path: Path) -> list[str]:
    """Return the uses of replaced words in the comments, docstrings and messages of a file, one line each."""
    text = path.read_text()
    if not ANY.search(text):
        return []  # tokenizing all files would take seconds
    lines = [
        (token.start[0] + i, line)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in PROSE
        for i, line in enumerate(token.string.split("\n"))
    ]
    return [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}, say {terms}"
        for number, line in lines
        for word, terms in REPLACED.items()
        if (match := re.search(rf"\b{word}\b", line, re.IGNORECASE))
    ]


def test_prose_has_none_of_the_replaced_words():
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path != Path(__file__))
    assert len(files) > 300
    found = [use for path in files for use in uses(path)]
    assert not found, "\n" + "\n".join(found)


def test_a_use_is_found_in_prose_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "x.py").write_text('told = 1  # a held-out loss\nheld = "rows held here"\n')
    assert uses(tmp_path / "x.py") == ["x.py:2: 'held', say local, allocated, replicated"]
