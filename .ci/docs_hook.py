"""MkDocs hook: pages keep their place in the repository, so that the same links work on GitHub and on the site.

Pages outside of docs/ (`launch/README.md`) and the files that pages link to (`dit/batch.py`) are read where they are. A
link to a folder leads to its README.md, or becomes text if there is none.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "dit", "energon_data", "launch", "recipes", "tests", "benchmarks", "examples")
LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)\s#]+)")


def pages() -> list[Path]:
    """Return all pages of the repository, as relative paths."""
    found = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    return sorted(path.relative_to(ROOT) for path in found)


def on_files(files: Files, config: Any) -> Files:
    """Replace the files of docs/ by all pages of the repository and the files that they link to."""
    linked = {
        (ROOT / page.parent / target).resolve()
        for page in pages()
        for target in LINK.findall((ROOT / page).read_text())
    }
    others = {path.relative_to(ROOT) for path in linked if path.is_file() and path.suffix != ".md"}
    shared = [file for file in files if not file.src_uri.endswith(".md")]  # of the theme
    own = [File.generated(config, str(path), abs_src_path=str(ROOT / path)) for path in (*pages(), *sorted(others))]
    return Files([*shared, *own])


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Replace links to folders."""
    folder = ROOT / PurePosixPath(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        target = match[1]
        return f"{target.rstrip('/')}/README.md" if (folder / target / "README.md").is_file() else target

    markdown = LINK.sub(link, markdown)
    return re.sub(
        r"\[([^\]]+)\]\((?!https?://|#)([^)\s#]+)\)",
        lambda m: m[1] if (folder / m[2]).is_dir() else m[0],
        markdown,
    )
