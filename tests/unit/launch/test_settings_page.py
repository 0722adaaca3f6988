"""docs/settings.md is up to date with the dataclasses, and every setting has a meaning."""

from dataclasses import dataclass, field
from typing import Literal, Optional

import pytest

from tests.support import settings_page


def test_the_page_is_up_to_date():
    assert settings_page.PAGE.read_text() == settings_page.page(), "run python -m tests.support.settings_page --write"


@dataclass
class Base:
    """A base.

    Attributes:
        a, b: two
            lines.
        c: of the base.
    """

    a: int = 1
    b: int = 2
    c: int = 3


@dataclass
class Derived(Base):
    """Says more.

    Args:
        c: of the derived class.

    Source: nowhere: not a field.
    """

    c: int = 4


def test_a_meaning_is_that_of_the_nearest_class():
    assert settings_page.meanings(Derived) == {
        "a": ("two lines.", Base),
        "b": ("two lines.", Base),
        "c": ("of the derived class.", Derived),
    }


def test_a_setting_without_a_meaning_is_named():
    @dataclass
    class Silent(Base):
        """Says nothing of d."""

        d: int = 5

    with pytest.raises(ValueError, match=r"Silent\.d has no line"):
        list(settings_page.rows(Silent))


@dataclass
class Sibling(Base):
    """Another class.

    Attributes:
        d: of its own.
    """

    c: int = 5
    d: int = 6


@dataclass
class Stranger:
    """No relative.

    Attributes:
        d: of its own.
    """

    d: int = 7


def test_settings_of_the_same_meaning_are_shared_under_the_name_of_their_class():
    tables = [list(settings_page.rows(kind)) for kind in (Base, Sibling, Stranger)]
    shared = {row.name: title for title, row in settings_page.shared_rows(tables).values()}
    assert shared == {"a": "Base", "b": "Base", "c": "Base", "d": settings_page.ANY_CLASS}


def test_a_setting_of_another_meaning_is_not_shared():
    tables = [list(settings_page.rows(kind)) for kind in (Base, Derived)]
    assert {row.name for _, row in settings_page.shared_rows(tables).values()} == {"a", "b"}


def test_a_class_lists_the_defaults_that_differ_from_the_shared_ones():
    tables = {kind: list(settings_page.rows(kind)) for kind in (Base, Sibling, Derived, Stranger)}
    shared = settings_page.shared_rows(tables.values())
    lines = {kind.__name__: settings_page.inherited(table, shared) for kind, table in tables.items()}
    assert lines == {
        "Base": "Also: Base.",
        "Sibling": "Also: Base (`c=5`), Shared settings (`d=6`).",
        "Derived": "Also: Base.",
        "Stranger": "Also: Shared settings (`d=7`).",
    }


def test_a_shared_setting_is_described_once():
    page = settings_page.page()
    assert page.count("* `num_classes=None` (int): ") == 1
    assert page.count("`num_classes=10`") == 1, "the default of DDPMUNetConfig differs"


@dataclass
class Typed:
    """Kinds of settings.

    Attributes:
        first, last: a number.
        limit: a limit.
        solver: a choice.
        sizes: a list.
        path: a text.
    """

    first: int = 4
    last: int = 5
    limit: Optional[float] = None
    solver: Literal["euler", "heun", "ddim"] = "heun"
    sizes: Optional[list[int]] = field(default_factory=lambda: [1, 2])
    path: str = ""


def test_a_line_has_the_types_and_values_that_the_default_does_not_show():
    *_, lines = settings_page.section("Typed", "", "", list(settings_page.rows(Typed)))
    assert lines.splitlines() == [
        "* `first=4`, `last=5`: a number.",
        "* `limit=None` (float): a limit.",
        "* `solver=heun` (`euler`, `ddim`): a choice.",
        "* `sizes=[1,2]` (None): a list.",
        "* `path=`: a text.",
    ]
