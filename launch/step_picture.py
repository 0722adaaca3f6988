"""Draw a planned step: a row for each pipeline stage, and a bar of what the step's time is made of."""

from PIL import Image, ImageDraw, ImageFont

from dit.planner.step import PlannedStep

WIDTH, MARGIN, ROW, GAP = 1200, 24, 26, 4
LABEL = 70
MOST_ROWS = 16
"""Pipeline stages that are drawn; of more, the first ones."""
INK, PAPER, WAITS = (30, 30, 30), (255, 255, 255), (236, 236, 236)
FORWARD, BACKWARD = (76, 114, 176), (85, 168, 104)
COLOURS = {
    "matmul": (76, 114, 176),
    "attention": (85, 168, 104),
    "memory-bound": (196, 173, 102),
    "tensor parallel": (196, 78, 82),
    "context parallel": (129, 114, 179),
    "expert parallel": (147, 120, 96),
    "pipeline sends": (218, 139, 195),
    "pipeline bubble": (204, 204, 204),
    "data parallel": (221, 132, 82),
    "optimizer": (100, 181, 205),
    "other": (80, 80, 80),
}


def draw(step: PlannedStep, title: str) -> Image.Image:
    """Draw a step."""
    rows = step.timeline[:MOST_ROWS]
    parts = [(name, seconds) for name, seconds in step.time.parts.items() if seconds > 1e-3 * step.time.total]
    top = MARGIN + 64 + len(rows) * (ROW + GAP)
    image = Image.new("RGB", (WIDTH, top + 20 + 2 * ROW + ROW * -(-len(parts) // 3) + MARGIN), PAPER)
    canvas, font, small = ImageDraw.Draw(image), ImageFont.load_default(size=15), ImageFont.load_default(size=11)
    canvas.text((MARGIN, MARGIN), title, fill=INK, font=font)
    end = max(passes[-1].end for passes in rows)
    left, scale = MARGIN + LABEL, (WIDTH - 2 * MARGIN - LABEL) / end
    shown = 1 + max(run.micro_batch for run in rows[0])
    note = f"forward blue, backward green, waits grey; {shown} micro-batches in {end * 1e3:,.0f} ms"
    canvas.text((MARGIN, MARGIN + 24), note, fill=INK, font=small)
    for index, passes in enumerate(rows):
        y = MARGIN + 48 + index * (ROW + GAP)
        canvas.text((MARGIN, y + 6), f"stage {index}", fill=INK, font=small)
        canvas.rectangle((left, y, WIDTH - MARGIN, y + ROW), fill=WAITS)
        for run in passes:
            box = (left + run.start * scale, y, left + run.end * scale, y + ROW)
            canvas.rectangle(box, fill=FORWARD if run.forward else BACKWARD, outline=PAPER)
            if box[2] - box[0] > 24:
                canvas.text((box[0] + 4, y + 6), str(run.micro_batch), fill=PAPER, font=small)
    canvas.text((MARGIN, top), f"parts of a step of {step.time.total * 1e3:,.0f} ms", fill=INK, font=small)
    _bar(canvas, parts, step.time.total, top + 20)
    for index, (name, seconds) in enumerate(parts):
        x, y = MARGIN + index % 3 * (WIDTH - 2 * MARGIN) // 3, top + 20 + 2 * ROW + index // 3 * ROW
        canvas.rectangle((x, y, x + 14, y + 14), fill=COLOURS[name])
        text = f"{name}: {seconds * 1e3:,.1f} ms, {seconds / step.time.total:.1%}"
        canvas.text((x + 22, y), text, fill=INK, font=small)
    return image


def _bar(canvas: ImageDraw.ImageDraw, parts: list[tuple[str, float]], total: float, top: float) -> None:
    """Draw the parts side by side."""
    x = float(MARGIN)
    for name, seconds in parts:
        width = seconds / total * (WIDTH - 2 * MARGIN)
        canvas.rectangle((x, top, x + width, top + ROW), fill=COLOURS[name])
        x += width
