"""Preparation converts pictures of wider colour spaces to sRGB, or counts and names those that it cannot convert."""

import io

import av
import numpy as np
import pytest
from PIL import Image, ImageCms

from dit.media import reads_heic
from energon_data.media_files import open_picture
from tests.unit.energon_data.colour_profiles import (
    ADOBE_RGB,
    DISPLAY_P3,
    cmyk_profile,
    colour_chart,
    grey_profile,
    in_srgb,
    rgb_profile,
    srgb_curve,
)
from tests.unit.energon_data.preparations import as_file, described, folder_of

ROUNDING = 1.5  # of 255: rounding of the conversion in 16 bits, and of the result in 8


@pytest.mark.parametrize("primaries", [DISPLAY_P3, ADOBE_RGB], ids=["Display P3", "Adobe RGB"])
def test_a_profile_is_converted_to_srgb(primaries):
    """Expected colours are computed with explicit matrices and gammas; unconverted ones differ by up to 20 of 255."""
    chart = colour_chart()
    opened = open_picture(as_file(chart, icc_profile=rgb_profile(primaries)))
    expected = in_srgb(np.asarray(chart), primaries)
    assert np.abs(np.asarray(opened) - expected).max() < ROUNDING
    assert np.abs(np.asarray(chart) - expected).max() > 6
    assert (opened.info["original"], opened.info["turned"], opened.info["colours"]) == (None, False, "converted")


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "TIFF", "AVIF", "HEIF"])
def test_every_format_has_its_profile_converted(kind):
    if kind == "HEIF" and not reads_heic():
        pytest.skip("pillow-heif is not installed")
    flat = Image.new("RGB", (32, 32), (140, 110, 120))
    options = {"quality": 95} if kind != "TIFF" else {}
    opened = open_picture(as_file(flat, kind, icc_profile=rgb_profile(DISPLAY_P3), **options))
    expected = in_srgb(np.array([140, 110, 120]), DISPLAY_P3)
    assert np.abs(np.asarray(opened)[8:24, 8:24].mean((0, 1)) - expected).max() < 3
    assert opened.info["colours"] == "converted"


def test_alpha_palettes_and_greys_are_converted():
    profile, colour = rgb_profile(DISPLAY_P3), (140, 110, 120)
    expected = in_srgb(np.array(colour), DISPLAY_P3)
    see_through = Image.new("RGBA", (2, 1), (*colour, 255))
    see_through.putpixel((1, 0), (0, 0, 0, 0))
    converted = np.asarray(open_picture(as_file(see_through, icc_profile=profile)))[0]
    assert np.abs(converted[0] - expected).max() < ROUNDING
    assert converted[1].tolist() == [255, 255, 255]
    palette = Image.new("RGB", (4, 4), colour).quantize(4)
    assert np.abs(np.asarray(open_picture(as_file(palette, icc_profile=profile)))[0, 0] - expected).max() < ROUNDING
    values = np.arange(256, dtype=np.uint8)
    for depth, picture in ((8, Image.fromarray(values[None])), (16, Image.fromarray(values[None].astype("u2") * 257))):
        grey = np.asarray(open_picture(as_file(picture, icc_profile=grey_profile(1.8))))[0]
        assert np.abs(grey - srgb_curve((values / 255) ** 1.8)[:, None]).max() < ROUNDING, depth


def test_cmyk_pictures_are_converted_by_their_profile():
    """Without a profile, full ink is black; with this one it is the grey of L* = 50, which is 119 in sRGB."""
    inks = Image.new("CMYK", (16, 16), (255, 255, 255, 0))
    opened = open_picture(as_file(inks, "JPEG", icc_profile=cmyk_profile(50), quality=100))
    assert np.abs(np.asarray(opened).astype(int) - 119).max() <= 3
    assert open_picture(as_file(inks, "JPEG", quality=100)).getpixel((0, 0)) == (0, 0, 0)


def test_a_file_whose_profile_is_srgb_is_unchanged():
    chart = colour_chart(0, 256)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    opened = open_picture(as_file(chart, icc_profile=profile))
    assert np.array_equal(np.asarray(opened), np.asarray(chart))
    assert (opened.info["original"], opened.info["turned"], opened.info["colours"]) == ("png", False, "sRGB")


def test_a_file_whose_pixels_change_is_not_stored_as_it_is():
    """A PNG may have a transparent colour or several frames; an orientation of 0 changes nothing."""
    chart = colour_chart(0, 256)
    exif = Image.Exif()
    exif[0x0112] = 0
    assert open_picture(as_file(chart, exif=exif)).info["original"] == "png"
    assert open_picture(as_file(chart, transparency=chart.getpixel((0, 0)))).info["original"] is None
    animated = as_file(chart, save_all=True, append_images=[chart.transpose(Image.Transpose.ROTATE_180)])
    assert open_picture(animated).info["original"] is None


@pytest.mark.parametrize(
    ("picture", "profile"),
    [
        (colour_chart(), b"no profile"),
        (colour_chart(), rgb_profile(DISPLAY_P3)[:200]),
        (colour_chart(), grey_profile()),
        (colour_chart(), cmyk_profile(50)),
        (colour_chart().convert("CMYK"), rgb_profile(DISPLAY_P3)),
    ],
    ids=["text", "cut off", "of greys", "of inks", "of a display, for inks"],
)
def test_a_profile_that_cannot_be_used_leaves_the_colours(picture, profile):
    opened = open_picture(as_file(picture, "TIFF", icc_profile=profile))
    assert np.array_equal(np.asarray(opened), np.asarray(open_picture(as_file(picture, "TIFF"))))
    assert opened.info["colours"] == "bad_profile"


def clip(transfer: int, primaries: int) -> bytes:
    """Return a clip of 4 frames that states its transfer and primaries (ITU-T H.273)."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as file:
        stream = file.add_stream("ffv1", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p10le"
        stream.codec_context.color_trc, stream.codec_context.color_primaries = transfer, primaries
        for _ in range(4):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 90, np.uint8), format="rgb24")
            frame = frame.reformat(format="yuv420p10le")
            frame.color_trc, frame.color_primaries = transfer, primaries
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def test_the_preparation_counts_colours_and_names_a_file_of_each_kind(tmp_path, capsys):
    profiles = {"phone": {"icc_profile": rgb_profile(DISPLAY_P3)}, "plain": {}, "damaged": {"icc_profile": b"none"}}
    clips = {"hlg": (18, 9), "pq": (16, 9), "wide": (1, 12), "bt709": (1, 1), "unstated": (2, 2)}
    files = {f"{name}.png": as_file(colour_chart(), **profile) for name, profile in profiles.items()}
    source = folder_of(tmp_path / "in", files | {f"{name}.mkv": clip(*kind) for name, kind in clips.items()})
    found = described(source, tmp_path / "out", command="folder")
    summary = capsys.readouterr().out
    assert "  colours converted to sRGB: 1 sample (phone.png)" in summary
    assert "  colour profile not readable, taken as sRGB: 1 sample (damaged.png)" in summary
    assert "  HDR or wide-gamut clips, colours not converted: 3 samples (hlg.mkv)" in summary
    counts = {"converted": 1, "bad_profile": 1, "not_converted": 3}
    assert found["colours"] == counts
