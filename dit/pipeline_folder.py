"""Folders of diffusers' pipelines, which have one folder for each network."""

from pathlib import Path

PIPELINE_INDEX = "model_index.json"


def name_a_part(path: Path | str, *kinds: str) -> str:
    """Return an error message if a path is a complete pipeline where one of its networks is needed, else an empty text.

    Args:
        kinds: beginnings of the names of networks that fit, such as `vae`.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return ""
    parts = sorted(entry.parent for entry in folder.glob("*/config.json"))
    fitting = [str(part) for part in parts if part.name.startswith(kinds)]
    if fitting:
        return f"{folder} is a complete pipeline; name its part, such as {' or '.join(fitting)}"
    if not (folder / PIPELINE_INDEX).is_file():
        return ""
    names = ", ".join(part.name for part in parts) or "none"
    return f"{folder} is a complete pipeline without a part {' or '.join(kinds)}; its parts are: {names}"
