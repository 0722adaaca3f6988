"""docs/settings.md is up to date with the dataclasses, and every setting has a meaning."""

from dataclasses import dataclass

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
