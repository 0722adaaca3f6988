"""Settings of recipes equal those of the published code that each test names."""

import pytest

from launch.config_file import built
from launch.train import call_recipe


@pytest.mark.parametrize("name", ["sit_xl2_imagenet", "sit_xl2_repa"])
def test_sit_reads_the_time_itself(name: str) -> None:
    """Source: willisma/SiT, `model(xt, t)` in transport/transport.py; sihyun-yu/REPA, loss.py: no factor of 1000."""
    assert built(call_recipe(name)).model.time_scale == 1.0
