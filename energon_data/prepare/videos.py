"""Cut videos into clips of one length."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

from PIL import Image

from dit.errors import ConfigError
from dit.terminal import counted
from energon_data.media_files import Deadline, sampled_frames
from energon_data.samples import SampleError

_SLOWEST, _FASTEST = 0.001, 1000.0  # frames per second
_TOLERANCE, _TICK = 0.05, 0.001  # of the duration of a clip, relative and in seconds


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Settings for cutting a video into clips.

    Attributes:
        fps: sampled frames per second; each sample is the frame displayed at that time. None for every frame.
        frames: frames of each clip; the last part of a video, if shorter, is dropped. None for one clip with all
            frames.
        multiple_of: the length of a clip is a multiple of this.
        after_first: the length is 1 + such a multiple, as causal autoencoders encode.
    """

    fps: Optional[float] = None
    frames: Optional[int] = None
    multiple_of: int = 1
    after_first: bool = False

    def __post_init__(self) -> None:
        if self.fps is not None and not _SLOWEST <= self.fps <= _FASTEST:
            raise ConfigError(f"--fps {self.fps:g} must be between 0.001 and 1000 frames per second")
        if self.frames is not None and (self.frames < 1 or self.usable(self.frames) != self.frames):
            causal = "1 + " if self.after_first else ""
            raise ConfigError(f"--frames {self.frames} must be {causal}a multiple of {self.multiple_of}")

    def usable(self, frames: int) -> int:
        """Return the largest allowed length of a clip within `frames`; 0 if there are too few."""
        first = min(frames, self.after_first)
        return first + (frames - first) // self.multiple_of * self.multiple_of


def clips_of(
    data: bytes,
    cut: Cut,
    span: Optional[tuple[float, Optional[float]]] = None,
    fit: Callable[[Image.Image], Image.Image] = lambda picture: picture,
) -> Iterator[tuple[list[Image.Image], float]]:
    """Cut a video into clips.

    Args:
        span: start and end in seconds of the part that is cut; None for the complete video.
        fit: changes the size of each frame as soon as it is decoded, so that a clip of full-size frames is never in
            memory.

    Yields:
        The frames of a clip, and frames per second. Clips that only repeat the last frame of the previous clip are left
        out, and an error at the end counts them.
    """
    frames: list[Image.Image] = []
    times: list[float] = []
    last: Optional[Image.Image] = None  # of the clip before
    stated, count, repeats = 0.0, 0, 0
    deadline = Deadline()
    for picture, instant, stated in sampled_frames(data, cut.fps, deadline, span):
        frames.append(deadline.keep(fit(picture)))
        times.append(instant)
        if cut.frames is not None and len(frames) == cut.frames:
            if last is not None and all(frame == last for frame in frames):
                repeats += 1
            else:
                yield frames, _rate(times, stated)
                count += 1
            last, frames, times = frames[-1], [], []
            deadline.restart()
    usable = cut.usable(len(frames)) if cut.frames is None else 0
    if usable:
        yield frames[:usable], _rate(times[:usable], stated)
    elif not count:
        raise SampleError("too_short", f"{counted(len(frames), 'frame')}, a clip needs {cut.frames or cut.multiple_of}")
    if repeats:
        raise SampleError("frozen", f"{counted(repeats, 'clip')} would only repeat the last frame of the previous clip")


def _rate(times: Sequence[float], stated: float) -> float:
    """Return the frames per second of a clip: measured, if the file states another rate, as with variable rates."""
    seconds, intervals = times[-1] - times[0], len(times) - 1
    is_constant = abs(seconds - intervals / stated) <= _TOLERANCE * seconds + _TICK
    if is_constant or not _SLOWEST * seconds <= intervals <= _FASTEST * seconds:
        return stated
    return intervals / seconds
