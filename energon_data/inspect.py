"""Summary of a data set: `python -m energon_data.inspect DIR`.

Reads samples as training does, and writes nothing except a requested contact sheet.
"""

import argparse
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from dit.command_line import Parser
from dit.errors import EXIT_OK, ConfigError, one_line_errors
from dit.sampling.grid import PIXEL_CHANNELS, image_grid, save_png, to_pictures
from dit.terminal import counted, echo
from energon_data.folder import check_dataset
from energon_data.report.survey import Survey, expected_packing, middle_frame, survey

DESCRIBED = ("latent_shape", "context_size", "text_encoder", "vae")
"""Entries of `dataset.json` to print."""
MOST_ROWS = 8
"""Number of sizes listed individually."""
DECODED_TILE = 1024
"""Pictures with longer sides are decoded in overlapping tiles of this many pixels."""
PICTURES = 36
"""Largest number of pictures in the contact sheet."""
TILE = 160
"""Side of a picture in the sheet."""
EXAMPLES = """\
examples
  python -m energon_data.inspect data/mine --sheet mine.png
  python -m energon_data.inspect data/latents --sheet latents.png --vae models/vae
  python -m energon_data.inspect data/mine --patch 1x2x2 --pack 2048 --samples 0
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(
        prog="python -m energon_data.inspect",
        description="Summarise a data set, from samples read in the same way as in training.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag("data", metavar="DIR", help="a data set folder (data.path)")
    flag("--split", default="train", help="(%(default)s)")
    flag("--samples", type=int, default=1000, metavar="N", help="samples to read; 0 for all (%(default)s)")
    flag("--patch", default="1x2x2", metavar="TxHxW", help="the model's patch, for tokens (%(default)s)")
    flag("--pack", type=int, metavar="N", help="tokens of a pack (data.max_tokens_per_pack)")
    flag("--multiple-of", type=int, default=16, metavar="N", help="data.pack_multiple_of (%(default)s)")
    flag("--sheet", type=Path, metavar="FILE.png", help="write a contact sheet of the samples")
    flag("--vae", metavar="NAME", help="decode the latents of the sheet with this autoencoder, not in false colours")
    flag("--no-checksums", action="store_true", help="read samples without checksums (data.require_checksums=False)")
    return parser


def spread_of(values: Sequence[float], digits: int = 0) -> str:
    """Format the range and the median of numbers; one number if all are equal."""
    low, middle, high = min(values), statistics.median(values), max(values)
    if low == high:
        return f"{low:,.{digits}f}"
    return f"{low:,.{digits}f} to {high:,.{digits}f}, median {middle:,.{max(digits, 1)}f}"


def shard_lines(survey_result: Survey) -> Iterator[str]:
    """Yield lines on the number of samples, shards and samples read."""
    info, sizes = survey_result.info, survey_result.shards.values()
    shards = counted(len(sizes), "shard")
    mib, per_shard = sum(size for _, size in sizes) / 2**20, spread_of([count for count, _ in sizes])
    yield f"{info.path}, split {info.split!r}"
    yield f"samples     {info.samples:,} in {shards}, {mib:,.1f} MiB (a shard: {per_shard} samples)"
    yield f"read        {survey_result.num_read:,} of them" + (
        "" if survey_result.num_read == info.samples else ", evenly distributed"
    )
    for reason, count in survey_result.lost.most_common():
        yield f"damaged     {reason}: {count:,}, the first: {survey_result.examples[reason]}"
    described = [f"{name} {value}" for name in DESCRIBED if (value := info.description.get(name))]
    if classes := info.description.get("class_names"):
        described.append(f"{len(classes)} class_names")
    if described:
        yield f"described   {', '.join(described)}"


def content_lines(survey_result: Survey) -> Iterator[str]:
    """Yield lines on parts and metadata, sizes, durations, texts and captions."""
    seen = survey_result.seen
    names = Counter(name for one in seen for name in one.names)
    name_shares = [name if n == len(seen) else f"{name} ({n / len(seen):.0%})" for name, n in sorted(names.items())]
    yield f"holds       {', '.join(name_shares)}"
    yield f"channels    {', '.join(map(str, sorted({one.size[0] for one in seen})))}"
    if survey_result.latents.number:
        yield f"latents     {survey_result.latents.line()}"
    yield "sizes       T x H x W"
    sizes = Counter(" x ".join(map(str, one.size[1:])) for one in seen)
    rows = sizes.most_common(MOST_ROWS)
    if rest := len(seen) - sum(count for _, count in rows):
        rows.append((f"{len(sizes) - MOST_ROWS} others", rest))
    yield from (f"  {size}  {count:,}  {count / len(seen):.1%}" for size, count in rows)
    clips = [one for one in seen if one.size[1] > 1]
    if clips:
        yield f"clips       {len(clips):,}, {spread_of([one.size[1] for one in clips])} frames"
        if durations := [one.duration_s for one in clips if one.duration_s is not None]:
            yield f"durations   {spread_of(durations, 2)} s, {sum(durations):,.1f} s in all"
    if texts := [one.text_tokens for one in seen if one.text_tokens is not None]:
        yield f"texts       {spread_of(texts)} tokens"
    if captions := [one.caption for one in seen if one.caption is not None]:
        words = spread_of([len(caption.split()) for caption in captions])
        share = f"{len(captions) / len(seen):.1%} of the samples"
        yield f"captions    {share}, {len(set(captions)):,} different, {words} words"
        yield from (f"  {caption[:100]!r}" for caption in list(dict.fromkeys(captions))[:3])
    else:
        yield "captions    none"


def token_lines(survey_result: Survey, patch: str, *, pack: Optional[int], multiple_of: int) -> Iterator[str]:
    """Yield lines on the number of tokens, and on how samples fill packs."""
    lengths = [(one.tokens(tuple(map(int, patch.split("x")))), one) for one in survey_result.seen]
    countable = [n for n, _ in lengths if n is not None]
    if refused := [one for n, one in lengths if n is None]:
        example = f"{refused[0].key}: {' x '.join(map(str, refused[0].size[1:]))}"
        yield f"refused     {len(refused):,} cannot be cut into patches of {patch}, such as {example}"
    if not countable:
        return
    yield f"tokens      {spread_of(countable)}, with patches of {patch}"
    if pack is not None:
        packing = expected_packing(countable, pack, multiple_of=multiple_of)
        longer = f"; {packing.too_long:.1%} of the samples are longer and dropped" if packing.too_long else ""
        yield (
            f"packs       of {pack:,} tokens: {packing.real:.2%} real, "
            f"{packing.samples / packing.packs:.1f} samples each{longer}"
        )


def tile_of(frame: Tensor) -> Tensor:
    """Return a frame `[C, H, W]` in the middle of a dark square `[3, TILE, TILE]`; latents in false colours."""
    picture = to_pictures(frame[None, :, None])[:, :, 0].expand(-1, 3, -1, -1)
    scale = TILE / max(picture.shape[-2:])
    scale = int(scale) if scale >= 1 else scale  # so that small pictures stay sharp
    height, width = (max(1, round(side * scale)) for side in picture.shape[-2:])
    left, top = (TILE - width) // 2, (TILE - height) // 2
    margins = (left, TILE - width - left, top, TILE - height - top)
    return pad(interpolate(picture, (height, width), mode="area")[0], margins, value=-0.8)


def write_sheet(survey_result: Survey, path: Path, vae: Optional[str]) -> str:
    """Write the contact sheet and return a line about it."""
    seen, frames = zip(*survey_result.shown, strict=True)
    captions = [f"{one.caption or '':.40} {'x'.join(map(str, one.size[1:]))} {one.key}" for one in seen]
    columns = math.ceil(math.sqrt(len(frames)))
    save_png(image_grid(torch.stack([tile_of(frame) for frame in frames]), captions, columns, scale=1), path)
    colours = "" if vae is None else f"; latents decoded by {vae}"
    if any(len(frame) not in PIXEL_CHANNELS for frame in frames):
        colours = "; latents in false colours: --vae decodes them"
    return f"sheet       {path}: {counted(len(frames), 'sample')}{colours}"


def decoder(name: str) -> Callable[[Tensor], Tensor]:
    """Return a function that decodes a latent `[C, t, h, w]` to its middle frame, `[3, H, W]` in [-1, 1].

    Args:
        name: autoencoder, as in `Geometry.read`; loaded at the first latent.
    """
    from dit.encoders.vae import Geometry, load_vae

    geometry = Geometry.read(name)

    def decoded(clip: Tensor) -> Tensor:
        if len(clip) != geometry.channels:
            raise ConfigError(
                f"--vae {name} decodes latents of {geometry.channels} channels, and the samples have {len(clip)}; use "
                "the autoencoder that encoded them, or omit --vae"
            )
        return middle_frame(load_vae(name).decode(clip[None], DECODED_TILE)[0].cpu())

    return decoded


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){2}", args.patch):
        raise ConfigError(f"--patch must be TxHxW such as 1x2x2, got {args.patch!r}")
    for name, low in (("samples", 0), ("pack", 1), ("multiple_of", 1)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least {low}")
    if args.vae is not None and args.sheet is None:
        raise ConfigError(f"--vae {args.vae} decodes the samples of the sheet; add --sheet FILE.png")
    show: Callable[[Tensor], Tensor] = middle_frame if args.vae is None else decoder(args.vae)
    survey_result = survey(
        check_dataset(args.data, args.split),
        limit=args.samples or None,
        pictures=0 if args.sheet is None else PICTURES,
        show=show,
        require_checksums=not args.no_checksums,
    )
    lines = [*shard_lines(survey_result), *content_lines(survey_result)]
    lines += token_lines(survey_result, args.patch, pack=args.pack, multiple_of=args.multiple_of)
    if args.sheet is not None:
        lines.append(write_sheet(survey_result, args.sheet, args.vae))
    echo(*lines, sep="\n", flush=True)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
