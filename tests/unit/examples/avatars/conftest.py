import pytest

from dit.errors import ConfigError
from examples.avatars import design


@pytest.fixture(scope="session", autouse=True)
def avatar_design():
    try:
        design.parts()
    except ConfigError as error:
        pytest.skip(str(error))
