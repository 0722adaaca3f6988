"""Clips as files: animated grids, as GIF (Pillow) or MP4 (PyAV)."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from torch import Tensor

from dit.errors import ConfigError
from dit.media import mp4_bytes
from dit.sampling.grid import image_grid, to_image, to_pictures, write_complete

if TYPE_CHECKING:
    from PIL.Image import Image

GIF_TICKS_PER_S = 100
"""A GIF stores the duration of a frame in hundredths of a second."""
MAX_GIF_FPS = 50.0
"""Frames of two hundredths of a second; viewers slow down faster clips."""


def clip_grid(
    samples: Tensor, captions: Optional[Sequence[str]] = None, columns: Optional[int] = None
) -> list["Image"]:
    """Arrange samples `[N, C, T, H, W]`, see `to_pictures`, in T grids, see `image_grid`."""
    return [image_grid(frame, captions, columns) for frame in to_pictures(samples).unbind(2)]


def clip_frames(clip: Tensor) -> list["Image"]:
    """Return the frames of a clip `[1 or 3, T, H, W]` in [-1, 1], not resized."""
    return [to_image(frame) for frame in clip.unbind(1)]


def save_gif(frames: Sequence["Image"], path: str | Path, fps: float) -> Path:
    """Write frames atomically as an endlessly repeating GIF, with integer hundredths of a second per frame."""
    ticks = round(GIF_TICKS_PER_S / fps)
    if ticks < 2:
        raise ConfigError(
            f"a GIF shows at most {MAX_GIF_FPS:g} frames per second, got {fps:g}; write an .mp4, or lower the rate"
        )
    first, *further_frames = frames
    buffer = BytesIO()
    # Pillow stores a frame equal to the previous one as a longer frame.
    first.save(buffer, format="GIF", save_all=True, append_images=further_frames, duration=10 * ticks, loop=0)
    return write_complete(path, buffer.getvalue())


def save_mp4(frames: Sequence["Image"], path: str | Path, fps: float) -> Path:
    """Write frames as an MP4 that browsers play (H.264, or MPEG-4 part 2 if PyAV lacks it), atomically."""
    return write_complete(path, mp4_bytes(frames, fps, pix_fmt="yuv420p", crf=18))


CLIP_WRITERS: dict[str, Callable[[Sequence["Image"], str | Path, float], Path]] = {".gif": save_gif, ".mp4": save_mp4}
