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


def test_a_setting_of_several_classes_is_listed_once():
    """If a default or the values of a class differ, its line about other sections shows them."""

    @dataclass
    class Base:
        """A base.

        Attributes:
            kind: of both.
            size: of the base.
        """

        kind: Literal["a", "b"]
        size: int = 1

    @dataclass
    class One(Base):
        """A class."""

        kind: Literal["a", "b"] = "a"

    @dataclass
    class Two(Base):
        """A class.

        Attributes:
            new: of this class.
        """

        kind: Literal["a", "b"] = "b"
        size: float = 2.5
        new: int = 3

    @dataclass
    class Other:
        """A class.

        Attributes:
            kind: of both.
        """

        kind: Literal["b", "c"] = "c"

    assert "".join(settings_page.part([One, Two, Other], summaries=True)).splitlines() == [
        *("### Shared settings", "* `kind=a` (`b`): of both."),
        *("### Base", "Also: Shared settings (`kind`).", "* `size=1`: of the base."),
        *("### One", "A class.", "Also: Base."),
        *("### Two", "A class.", "Also: Base (`size=2.5`).", "* `new=3`: of this class."),
        *("### Other", "A class.", "Also: Shared settings (`kind=c` (`b`))."),
    ]
