"""Sizes that can be drawn, in pixels or in latent positions, and the errors for other sizes."""

from typing import Any, Optional

import pytest

from dit.encoders.vae import Geometry
from dit.errors import ConfigError
from dit.inference.sizes import check_size
from dit.models.dit.config import DiTConfig
from dit.models.edm2_unet.config import EDM2UNetConfig
from dit.models.moviegen.config import MovieGenConfig
from dit.models.unet.config import UNetConfig

IMAGE = Geometry(kind="AutoencoderKL", channels=4, time=1, space=8, mean=(0.0,), std=(1.0,))
VIDEO = Geometry(kind="AutoencoderKLWan", channels=16, time=4, space=8, mean=(0.0,), std=(1.0,))
STILLS, CLIPS = DiTConfig(patch_spatial=2), DiTConfig(patch_spatial=2, patch_temporal=2)
LEARNED = MovieGenConfig(patch_spatial=2, patch_temporal=1, max_grid=[5, 32, 48])


@pytest.mark.parametrize(
    ("model", "geometry", "size", "latent"),
    [
        (STILLS, None, (1, 32, 48), (1, 32, 48)),
        (STILLS, IMAGE, (1, 512, 768), (1, 64, 96)),
        (STILLS, IMAGE, (3, 512, 768), (3, 64, 96)),
        (STILLS, VIDEO, (81, 480, 832), (21, 60, 104)),
        (CLIPS, None, (1, 8, 8), (1, 8, 8)),
        (CLIPS, VIDEO, (5, 64, 64), (2, 8, 8)),
        (LEARNED, VIDEO, (17, 512, 768), (5, 64, 96)),
    ],
)
def test_sizes_in_pixels_become_those_of_the_latent(
    model: Any, geometry: Optional[Geometry], size: tuple[int, int, int], latent: tuple[int, int, int]
) -> None:
    assert check_size(model.batch_spec(), model, size, geometry) == latent


@pytest.mark.parametrize(
    ("model", "geometry", "size", "message"),
    [
        (STILLS, None, (1, 33, 48), "the height of 33 is not a multiple of 2 .*; use 32 or 34"),
        (STILLS, IMAGE, (1, 512, 500), r"width of 500 .* 16 \(a patch of 2 x 8 pixels.*; use 496 or 512"),
        (STILLS, IMAGE, (1, 3, 512), "use 16$"),
        (CLIPS, None, (3, 8, 8), "frames=3 cannot be cut into patches of 2 frames; .*: 2 or 4"),
        (STILLS, VIDEO, (80, 64, 64), r"frames=80 .* 1 \+ a multiple of 4 frames: 77 or 81"),
        (CLIPS, VIDEO, (9, 64, 64), r"frames=9 .*: 5 or 13"),
        (LEARNED, VIDEO, (21, 512, 768), "are 6 x 32 x 48 patches, .* for 5 x 32 x 48; draw at most 17 x 512 x 768"),
        (LEARNED, None, (5, 66, 96), "draw at most 5 x 64 x 96"),
        (EDM2UNetConfig(), None, (1, 36, 64), r"36 is not a multiple of 8 \(a patch of 1, times 8 for.*; use 32 or 40"),
        (UNetConfig(), IMAGE, (1, 64, 96), r"96 is not a multiple of 64 \(.* pixels .*, times 8 for the levels"),
    ],
)
def test_other_sizes_are_refused_with_the_nearest_that_fit(
    model: Any, geometry: Optional[Geometry], size: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_size(model.batch_spec(), model, size, geometry)


def test_positions_without_a_table_have_no_limit() -> None:
    model = MovieGenConfig(position_embedding="sincos_3d", patch_spatial=2)
    assert check_size(model.batch_spec(), model, (9, 4096, 4096)) == (9, 4096, 4096)
