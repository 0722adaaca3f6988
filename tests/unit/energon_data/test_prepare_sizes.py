"""Sizes and crops of prepared pictures: multiples, areas, ratios and limits."""

import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preparations import folder_of, noise, run

from dit.errors import EXIT_CONFIG, EXIT_OK, ConfigError
from energon_data.prepare.pictures import Fit, buckets
from energon_data.samples import SampleError
from tests.unit.energon_data.awkward_media import marked, mp4

SIDES = st.integers(1, 3000)


@settings(deadline=None)
@given(
    SIDES,
    SIDES,
    st.sampled_from([8, 16, 24]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from(["keep", "square", "buckets"]),
    st.booleans(),
)
def test_sizes_are_multiples_within_the_area_and_cover_without_enlarging(width, height, m, times, aspect, enlarge):
    size = m * times
    fit = Fit(size=size, aspect=aspect, multiple_of=m, enlarge=enlarge, max_cut=1)
    if not enlarge and min(width, height) < (m if aspect == "keep" else size if aspect == "square" else 0):
        with pytest.raises(SampleError, match="--enlarge scales it up"):
            fit.target(width, height)
        return
    if aspect == "buckets" and not enlarge and all(w > width or h > height for w, h in buckets(size, m)):
        return
    wide, high, cut_wide, cut_high = fit.target(width, height)
    assert cut_wide % m == cut_high % m == 0
    assert 0 < cut_wide <= wide
    assert 0 < cut_high <= high
    assert cut_wide * cut_high <= size * size
    assert min(wide - cut_wide, high - cut_high) <= 1  # one side fits exactly, up to a pixel of rounding
    scale = max(cut_wide / width, cut_high / height)
    assert abs(wide - width * scale) <= 1
    assert abs(high - height * scale) <= 1
    assert enlarge or (wide <= width and high <= height)
    if aspect == "keep":  # of the sizes with a side that cannot be longer, it has the largest area * kept**4

        def is_allowed(w: int, h: int) -> bool:
            return w * h <= size * size and (enlarge or (w <= width and h <= height))

        def score(w: int, h: int) -> float:
            return w * h * min(w / h * height / width, h / w * width / height) ** 4

        for w in range(m, size * size // m + 1, m):
            for h in range(m, size * size // w + 1, m):
                if is_allowed(w, h) and not (is_allowed(w + m, h) and is_allowed(w, h + m)):
                    assert score(cut_wide, cut_high) >= score(w, h) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("picture", "stored", "cut"),
    [
        ((200, 100), (80, 48), 0.17),  # 80 x 32 would lose 29 %
        ((96, 64), (80, 48), 0.09),
        ((256, 144), (80, 48), 0.06),
        ((64, 64), (64, 64), 0),
        ((40, 40), (32, 32), 0),
    ],
)
def test_small_sizes_lose_few_pixels(picture, stored, cut):
    target = Fit(size=64).target(*picture)
    assert target[2:] == stored
    assert target.cut == pytest.approx(cut, abs=0.01)


@pytest.mark.parametrize("aspect", ["square", "buckets"])
def test_enlarging_and_extreme_crops_need_a_flag(aspect):
    options = {"size": 128, "aspect": aspect}
    for picture in ((64, 64), (1, 5000)):
        with pytest.raises(SampleError, match="--enlarge scales it up") as caught:
            Fit(**options).target(*picture)
        assert caught.value.reason == "too_small"
    assert Fit(**options, enlarge=True).target(64, 64) == (128, 128, 128, 128)
    with pytest.raises(SampleError, match=r"--max-cut 0\.5 is the limit") as caught:
        Fit(**options, enlarge=True).target(1, 5000)
    assert caught.value.reason == "cut_too_much"
    assert Fit(**options, enlarge=True, max_cut=1).target(1, 5000).cut > 0.95
    assert Fit(**options).target(400, 300).cut < 0.26


def test_a_line_of_pixels_is_not_scaled_to_gigabytes():
    with pytest.raises(SampleError, match="1 x 32768 pixels, scaled to 1024 x 33554432, more than") as caught:
        Fit(size=1024, aspect="square", enlarge=True, max_cut=1).target(1, 32768)
    assert caught.value.reason == "too_large"


def test_native_sizes_lose_less_than_a_multiple():
    assert Fit(multiple_of=16).target(100, 63) == (100, 63, 96, 48)


def test_buckets_cover_the_ratios_with_the_largest_areas():
    found = buckets(256, 32)
    assert (256, 256) in found
    for width, height in found:
        assert width * height <= 256**2 < (width + 32) * (height + 32)
        assert 1 / 4 <= width / height <= 4


def test_crops_are_centred():
    picture = noise(50, 20)
    cut = Fit(multiple_of=16).apply(picture)
    assert cut.size == (48, 16)
    assert np.array_equal(np.asarray(cut), np.asarray(picture)[2:18, 1:49])


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 100},
        {"size": 0},
        {"multiple_of": 0},
        {"aspect": "square"},
        {"aspect": "buckets"},
        {"enlarge": True},
        {"max_cut": 1.5},
    ],
)
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ConfigError):
        Fit(**wrong)


@pytest.mark.parametrize(("setting", "value"), [("frames", 0), ("fps", 0)])
def test_impossible_numbers_of_a_command_are_refused_by_name(tmp_path, capsys, setting, value):
    assert run(tmp_path, tmp_path / "out", f"--{setting}", str(value), command="videos") == EXIT_CONFIG
    assert f"--{setting} {value} must" in capsys.readouterr().err


def test_clips_have_the_lengths_that_the_autoencoder_encodes(tmp_path, capsys):
    """A causal one encodes its first frame separately; the lengths of a video's clips are checked at the start."""
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLWan"}')
    words = ["--vae", str(tmp_path), "--frames", "8"]
    assert run(tmp_path, tmp_path / "out", *words, command="videos") == EXIT_CONFIG
    assert "--frames 8 must be 1 + a multiple of 4" in capsys.readouterr().err


def test_frames_of_a_video_are_scaled_one_by_one(tmp_path, monkeypatch):
    """A clip of full-size frames would fill the memory: the decoder and the clip hold two at most."""
    apply, decoded, counts = Fit.apply, [], []

    def counting(fit, picture):
        decoded.append(weakref.ref(picture))
        counts.append(sum(reference() is not None for reference in decoded))
        return apply(fit, picture)

    monkeypatch.setattr(Fit, "apply", counting)
    source = folder_of(tmp_path / "in", {"a.mp4": mp4(marked(), 12)})
    assert run(source, tmp_path / "out", "--size", "32", command="videos") == EXIT_OK
    assert len(counts) == 12
    assert max(counts) <= 2
