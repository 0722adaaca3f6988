"""Arguments that the metrics of the examples share."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from dit.errors import ConfigError
from examples.avatars.score import AVATARS
from examples.letters.edit_score import EDITS
from examples.letters.score import LETTERS
from examples.pictograms.score import PICTOGRAMS
from launch.measurement import Metric


@pytest.mark.parametrize("metric", [LETTERS, EDITS, PICTOGRAMS, AVATARS], ids=lambda metric: metric.summary[:30])
def test_a_minimum_that_is_no_share_is_refused_before_samples_are_drawn(metric: Metric) -> None:
    args = Namespace(data=None, minimum=90.0, minimum_style=None, minimum_motion=None, minimum_family=None)
    with pytest.raises(ConfigError, match=r"--minimum 90\.0 is a share; use a value from 0 to 1"):
        metric.measure(args, SimpleNamespace(autoencoder=None))  # type: ignore[arg-type]
