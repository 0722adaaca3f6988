"""Clips as files: frames and frame rate are read back as written, and the clip repeats."""

import builtins

import numpy as np
import pytest
import torch
from PIL import Image

from dit.errors import ConfigError
from dit.sampling import grid
from dit.sampling.clips import clip_grid, save_gif, save_mp4

LOSSY = 24  # of 255: the largest change by H.264 at this quality


def moving_dot(frames: int = 6, size: int = 8) -> torch.Tensor:
    """Return two clips of a bright dot that moves along the diagonal, one forwards, one backwards."""
    clips = torch.full((2, 1, frames, size, size), -1.0)
    for t in range(frames):
        clips[0, 0, t, t, t] = clips[1, 0, t, frames - 1 - t, frames - 1 - t] = 1.0
    return clips


def tile(picture: np.ndarray, index: int, columns: int, size: int = 8) -> np.ndarray:
    """Cut tile `index` out of a grid and shrink it to its own pixels."""
    scale = grid.enlargement(size, size)
    left, top = grid.tile_origin(index, columns, size * scale, size * scale, captions=True)
    return picture[top : top + size * scale : scale, left : left + size * scale : scale]


def test_a_grid_shows_every_sample_in_every_frame():
    clips = moving_dot()
    frames = clip_grid(clips, ["a", "b"], columns=2)
    assert len(frames) == clips.shape[2]
    for t, image in enumerate(frames):
        for index in range(2):
            expected = grid.to_bytes(clips[index, :, t]).numpy()
            assert np.array_equal(tile(np.asarray(image), index, 2), expected)


def test_a_gif_keeps_every_frame_its_rate_and_repeats(tmp_path):
    frames = clip_grid(moving_dot(), ["a", "b"])
    path = save_gif(frames, tmp_path / "deep" / "x.gif", fps=8)
    with Image.open(path) as clip:
        assert clip.n_frames == len(frames)
        assert clip.info["loop"] == 0
        for t, expected in enumerate(frames):
            clip.seek(t)
            assert clip.info["duration"] == 120  # an eighth of a second, rounded to hundredths
            assert np.array_equal(np.asarray(clip.convert("RGB")), np.asarray(expected))
    assert [p.name for p in path.parent.iterdir()] == ["x.gif"]


def test_equal_frames_keep_their_time(tmp_path):
    frames = clip_grid(torch.zeros(1, 1, 4, 8, 8))
    with Image.open(save_gif(frames, tmp_path / "x.gif", fps=10)) as clip:
        assert sum(_durations(clip)) == 400


def _durations(clip):
    for t in range(clip.n_frames):
        clip.seek(t)
        yield clip.info["duration"]


def test_a_rate_that_a_gif_cannot_state_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"at most 50.*got 100"):
        save_gif(clip_grid(moving_dot()), tmp_path / "x.gif", fps=100)


@pytest.mark.parametrize("fps", [8, 29.97])
def test_an_mp4_keeps_every_frame_and_its_rate(tmp_path, fps):
    av = pytest.importorskip("av")
    frames = clip_grid(moving_dot(), ["a", "b"])
    assert frames[0].size[0] % 2 == 0
    path = save_mp4(frames, tmp_path / "x.mp4", fps=fps)
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        assert float(stream.average_rate) == pytest.approx(fps, rel=1e-3)
        read = [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]
    assert len(read) == len(frames)
    for found, expected in zip(read, frames, strict=True):
        for index in range(2):
            wanted = tile(np.asarray(expected), index, 2)[..., 0]
            assert np.abs(tile(found, index, 2)[..., 0].astype(int) - wanted).mean() < LOSSY
            assert tile(found, index, 2)[..., 0].argmax() == wanted.argmax()


def test_odd_sides_are_padded(tmp_path):
    av = pytest.importorskip("av")
    picture = Image.fromarray(np.full((7, 9, 3), 200, np.uint8))
    with av.open(str(save_mp4([picture], tmp_path / "x.mp4", fps=8))) as file:
        (frame,) = file.decode(file.streams.video[0])
    assert (frame.width, frame.height) == (10, 8)
    assert np.abs(frame.to_ndarray(format="rgb24").astype(int) - 200).max() < LOSSY


def test_without_pyav_the_cure_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "av":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"PyAV.*\.\[video\].*\.gif"):
        save_mp4(clip_grid(moving_dot()), tmp_path / "x.mp4", fps=8)
    assert not list(tmp_path.iterdir())
