"""Files of prompts: one text per line, or one JSON object per line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from dit.errors import ConfigError
from dit.safe_files import parse_json, read_bytes

FIELDS = {"prompt": str, "negative": str, "seed": int, "original_size": list, "crop": list, "target_size": list}
LENGTHS = ("original_size", "crop", "target_size")
EXAMPLE = '{"prompt": "a cat", "seed": 7}'
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Prompt:
    """A text to draw.

    Attributes:
        seed: of its noise; None for the seed shared by all prompts.
        original_size, crop, target_size: of the picture in pixels, height (top) first, for a model of Stable Diffusion
            XL; None for those shared by all prompts.
    """

    prompt: str
    negative: Optional[str] = None
    seed: Optional[int] = None
    original_size: Optional[list[int]] = None
    crop: Optional[list[int]] = None
    target_size: Optional[list[int]] = None


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a file of prompts, one per line; in `.jsonl`, a line is an object with the fields of `Prompt`.

    Empty lines are skipped.
    """
    path = Path(path)
    try:
        lines = read_bytes(path).decode("utf-8-sig").split("\n")  # not at other separators of Unicode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--prompts {path} cannot be read: {error}; give a text file of one prompt per line"
        ) from error
    read = _from_json if path.suffix.lower() == ".jsonl" else lambda text, where: Prompt(text)
    prompts = [read(line.strip(), f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {path} has no prompt; write one per line")
    return prompts


def _from_json(line: str, where: str) -> Prompt:
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}; write an object such as {EXAMPLE}") from error
    if not isinstance(fields, dict) or "prompt" not in fields:
        raise ConfigError(f"{where} is not an object with a 'prompt'; its fields are {', '.join(FIELDS)}")
    for name, value in fields.items():
        if name not in FIELDS:
            raise ConfigError(f"{where} has a field {name!r}; the fields are {', '.join(FIELDS)}")
        optional = value is None and name != "prompt"
        if not optional and (not isinstance(value, FIELDS[name]) or isinstance(value, bool)):
            raise ConfigError(f"{where}: {name} is {value!r}, expected {FIELDS[name].__name__}")
    if (seed := fields.get("seed")) is not None and not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"{where}: seed {seed} is outside 0 to {MAX_SEED}")
    for name in LENGTHS:
        pair = fields.get(name)
        if pair is not None and not (len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)):
            raise ConfigError(f"{where}: {name} is {pair!r:.60}, expected two integers in pixels, such as [1024, 768]")
    return Prompt(**fields)
