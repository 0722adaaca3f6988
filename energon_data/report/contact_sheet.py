"""Contact sheets: pictures of any size as tiles, each with two lines of text."""

import math
from collections.abc import Sequence

from PIL import Image, ImageDraw
from torch import Tensor

from dit.sampling.grid import BACKGROUND, GAP, INK, caption_font, to_bytes, to_pictures

TILE = 160
LINE = 15


def tile_of(frame: Tensor) -> Image.Image:
    """Convert a frame to a picture that fits a tile.

    Args:
        frame: `[C, H, W]`; 1 or 3 channels are pixels in [-1, 1]; other numbers of channels are drawn as a preview.
    """
    picture = Image.fromarray(to_bytes(to_pictures(frame[None, :, None])[0, :, 0]).numpy())
    scale = TILE / max(picture.size)
    if scale >= 1:  # an integer factor, so that small pictures stay sharp
        return picture.resize((picture.width * int(scale), picture.height * int(scale)), Image.Resampling.NEAREST)
    return picture.resize(
        (max(1, round(picture.width * scale)), max(1, round(picture.height * scale))), Image.Resampling.LANCZOS
    )


def contact_sheet(entries: Sequence[tuple[Tensor, str, str]]) -> Image.Image:
    """Arrange frames in a grid, about as wide as high."""
    columns = math.ceil(math.sqrt(len(entries)))
    rows = -(-len(entries) // columns)
    height = TILE + 2 * LINE + GAP
    sheet = Image.new("RGB", (GAP + columns * (TILE + GAP), GAP + rows * height), BACKGROUND)
    font = caption_font(11)
    for index, (frame, *lines) in enumerate(entries):
        row, column = divmod(index, columns)
        left, top = GAP + column * (TILE + GAP), GAP + row * height
        tile = tile_of(frame)
        sheet.paste(tile, (left + (TILE - tile.width) // 2, top + (TILE - tile.height) // 2))
        for number, text in enumerate(lines):
            strip = Image.new("RGB", (TILE, LINE), BACKGROUND)
            ImageDraw.Draw(strip).text((0, 0), text, fill=INK, font=font)
            sheet.paste(strip, (left, top + TILE + number * LINE))
    return sheet
