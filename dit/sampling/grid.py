"""Picture grids: tiles with a caption above each, written atomically."""

import math
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from torch import Tensor

from dit.batch import pixel_bytes
from dit.durable_files import write_atomic
from dit.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

BACKGROUND = (24, 24, 27)
INK = (228, 228, 231)
CAPTION_HEIGHT = 16
"""Height of a line of text in pixels."""
GAP = 4
MIN_TILE = 64
PIXEL_CHANNELS = (1, 3)
"""Channels of pictures; samples with another number of channels are latents."""


def to_bytes(images: Tensor) -> Tensor:
    """Return images `[..., 1 or 3, H, W]` in [-1, 1] as uint8 `[..., H, W, 3]`, see `pixel_bytes`."""
    channels = images.shape[-3]
    if channels not in PIXEL_CHANNELS:
        raise ConfigError(f"a picture has 1 or 3 channels, got {channels}; decode latents, or show 3 of their channels")
    pixels = pixel_bytes(images.detach().cpu())
    return pixels.expand(*pixels.shape[:-3], 3, *pixels.shape[-2:]).movedim(-3, -1)


def to_image(pixels: Tensor) -> "Image":
    """Convert a picture `[1 or 3, H, W]` in [-1, 1] to a Pillow image of the same size."""
    from PIL import Image

    return Image.fromarray(to_bytes(pixels).numpy())


def to_pictures(samples: Tensor) -> Tensor:
    """Return pixels `[N, 1 or 3, T, H, W]`, clipped to [-1, 1], or a preview of latents, which needs no decoder.

    The preview shows the first three channels, each sample scaled so that three standard deviations fill the range.
    Shapes are correct, colours are not.
    """
    samples = samples.detach().float()
    if samples.shape[1] in PIXEL_CHANNELS:
        return samples.clamp(-1, 1)
    channels = samples[:, : 3 if samples.shape[1] > 3 else 1]
    mean, std = channels.mean((1, 2, 3, 4), keepdim=True), channels.std((1, 2, 3, 4), keepdim=True)
    return ((channels - mean) / (3 * std).clamp(min=1e-6)).clamp(-1, 1)


def tile_origin(index: int, columns: int, height: int, width: int, *, captions: int) -> tuple[int, int]:
    """Return the (left, top) pixel of tile `index` in a grid of (enlarged) tiles."""
    row, column = divmod(index, columns)
    caption = captions * CAPTION_HEIGHT
    return GAP + column * (width + GAP), GAP + row * (height + caption + GAP) + caption


def enlargement(height: int, width: int) -> int:
    """Return the integer factor that makes the shorter side of a tile at least `MIN_TILE` pixels."""
    return max(1, -(-MIN_TILE // min(height, width)))


def caption_font(size: int) -> "FreeTypeFont":
    """Return a font with the letters of European languages; Pillow's own has only those of English."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), size)


def image_grid(
    images: Tensor, captions: Optional[Sequence[str]] = None, columns: Optional[int] = None, scale: Optional[int] = None
) -> "Image":
    """Arrange images row by row, each with its caption above; a caption is at most as high as two tiles.

    Args:
        images: `[N, C, H, W]` in [-1, 1], C = 1 or 3.
        columns: tiles per row; about twice as wide as high if None.
    """
    from PIL import Image, ImageDraw

    count, height, width = len(images), *images.shape[-2:]
    if not count:
        raise ConfigError("a grid needs at least one image, got 0")
    if captions is not None and len(captions) != count:
        raise ConfigError(f"{count} images have {len(captions)} captions; give one per image")
    columns = columns or min(count, math.ceil((2 * count) ** 0.5))
    scale = scale or enlargement(height, width)
    tile_h, tile_w = height * scale, width * scale
    font = caption_font(12)
    texts = [
        wrap(caption, tile_w, 2 * tile_h // CAPTION_HEIGHT, font.getlength) for caption in captions or [""] * count
    ]
    lines = 0 if captions is None else max(map(len, texts))
    rows = -(-count // columns)
    right, bottom = tile_origin(rows * columns - 1, columns, tile_h, tile_w, captions=lines)
    canvas = Image.new("RGB", (right + tile_w + GAP, bottom + tile_h + GAP), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for index, pixels in enumerate(to_bytes(images)):
        left, top = tile_origin(index, columns, tile_h, tile_w, captions=lines)
        tile = Image.fromarray(pixels.numpy()).resize((tile_w, tile_h), Image.Resampling.NEAREST)
        for line, text in enumerate(reversed(texts[index])):
            middle = left + tile_w // 2, top - line * CAPTION_HEIGHT - CAPTION_HEIGHT // 2
            draw.text(middle, text, fill=INK, font=font, anchor="mm")
        canvas.paste(tile, (left, top))
    return canvas


def wrap(text: str, width: float, max_lines: int, measure: Callable[[str], float]) -> list[str]:
    """Break a caption into lines of at most `width`, between words if possible; "…" ends a truncated text."""
    lines = [""]
    for word in text.split():
        if measure(f"{lines[-1]} {word}".lstrip()) <= width:
            lines[-1] = f"{lines[-1]} {word}".lstrip()
            continue
        if len(lines) > max_lines:
            break
        lines += [""] if lines[-1] else []
        for letter in word:
            if lines[-1] and measure(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    if len(lines) > max_lines:
        last = lines[max_lines - 1]
        while last and measure(last + "…") > width:
            last = last[:-1]
        lines = [*lines[: max_lines - 1], last + "…"]
    return lines


def spread(count: int, limit: int) -> list[int]:
    """Return at most `limit` of the numbers below `count`, evenly spread."""
    return list(range(count)) if count <= limit else [i * count // limit for i in range(limit)]


def save_png(image: "Image", path: str | Path) -> Path:
    """Write a PNG atomically, in a folder that is created if missing; return the path."""
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return write_complete(path, buffer.getvalue())


def write_complete(path: str | Path, data: bytes) -> Path:
    """Write a file atomically; its folder is created if missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)
    return path
