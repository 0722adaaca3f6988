"""docs/settings.md says what the dataclasses say, and every setting has a meaning."""

from dataclasses import dataclass

import pytest

from launch import settings_page


def test_the_page_is_true():
    assert settings_page.PAGE.read_text() == settings_page.page(), "run python -m launch.settings_page --write"


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
    assert settings_page.meanings(Derived) == {"a": "two lines.", "b": "two lines.", "c": "of the derived class."}


def test_a_setting_without_a_meaning_is_named():
    @dataclass
    class Silent(Base):
        """Says nothing of d."""

        d: int = 5

    with pytest.raises(ValueError, match=r"Silent\.d has no line"):
        list(settings_page.rows(Silent))


def test_a_shared_setting_is_described_once_and_has_its_default_in_every_class():
    page = settings_page.page()
    assert (
        page.count(
            "| `num_classes` | int or None | number of classes that the model is conditioned on; None for none. |"
        )
        == 1
    )
    _, _, dit = page.partition("### DiTConfig")
    assert "`num_classes` (`None`)" in dit.partition("###")[0]
