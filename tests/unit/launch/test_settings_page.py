"""docs/settings.md is up to date with the dataclasses, and every setting has a meaning."""

from dataclasses import dataclass
from typing import Literal

import pytest

from tests.support import settings_page


def test_the_page_is_up_to_date():
    assert settings_page.PAGE.read_text() == settings_page.page(), "run python -m tests.support.settings_page --write"


def test_a_setting_without_a_meaning_is_named():
    @dataclass
    class Silent:
        """Says nothing of d."""

        d: int = 5

    with pytest.raises(ValueError, match=r"Silent\.d has no line"):
        list(settings_page.rows(Silent))


def test_a_setting_of_two_classes_is_listed_once():
    """If a default or the values of a class differ, its line about shared settings shows them."""

    @dataclass
    class One:
        """A class.

        Attributes:
            kind: of both.
        """

        kind: Literal["a", "b"] = "a"

    @dataclass
    class Two:
        """A class.

        Attributes:
            kind: of both.
        """

        kind: Literal["b", "c"] = "c"

    tables = [list(settings_page.rows(one)) for one in (One, One, Two)]
    shared = settings_page.shared_rows(tables)
    assert [row.choices for _, row in shared.values()] == ["`kind=a` (`b`)"]
    assert [settings_page.inherited(table, shared) for table in (tables[0], tables[2])] == [
        "Also: Shared settings (`kind=a`).",
        "Also: Shared settings (`kind=c` (`b`)).",
    ]
