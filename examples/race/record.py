"""Tracks of the race, its records, and the table and plot of README.md."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Optional

from dit.errors import DataError
from dit.safe_files import parse_json, read_bytes

FOLDER = Path(__file__).parent
PAGE, PLOT = FOLDER / "README.md", FOLDER / "records.png"
HEADING = "\n## Records\n"
TO_THE_BIT = {
    "data_sha256": "the data differ; prepare them from the same files with the same version",
    "judge_sha256": "the judge differs, so its results cannot be compared",
    "steps": "the lengths of the runs differ",
    "losses_sha256": "a loss differs",
    "weights_sha256": "the weights at the end differ",
    "right": "the number of right results differs",
    "total": "the number of results differs",
}
"""Fields that must be equal in a replay, with the meaning of a difference; an earlier one may cause later ones."""
SLOWER = 1.25  # a replay on the same machine may take this many times the claimed process time


@dataclass(frozen=True)
class Track:
    """A task of the race and its pass mark.

    Attributes:
        factory: recipe that a command trains if it names none.
        mark: share of the results that must be right with every seed.
        judge: arguments of `launch.evaluate`.
        count: the numbers of right results and of all results in the record of the judge.
        judge_file: file next to the data with the judge's weights, if it is a trained model.
        unit: name of the results, in the plural.
    """

    factory: str
    mark: float
    judge: tuple[str, ...]
    count: Callable[[Mapping[str, Any]], tuple[int, int]]
    judge_file: Optional[str]
    unit: str


letters_read: Callable[[Mapping[str, Any]], tuple[int, int]] = itemgetter("correct", "total")


def attributes_of_new_pairs(result: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many attributes of avatars with new pairs are as requested, and how many there are."""
    (score,) = (score for score in result["scores"] if score["kind"] == "new pair")
    total = score["samples"] * len(score["by_attribute"])
    return round(score["attributes"] * total), total


TRACKS = {
    "letters": Track("letters_dit", 0.9, ("--metric", "letters"), letters_read, "letter_reader.safetensors", "letters"),
    "avatars": Track("avatars_text", 0.9, ("--metric", "avatars"), attributes_of_new_pairs, None, "attributes"),
}


@dataclass(frozen=True)
class Record:
    """Runs of the race that differ only in their seed. The digests and times are those of the recipe's seed.

    Attributes:
        change: change since the record before.
        factory, overrides, ranks: arguments of the training command.
        revision: commit of the code.
        process_s: CPU time of the training command and all its processes, in seconds.
        wall_s: elapsed time in seconds, which depends on other work on the machine.
        data_sha256, judge_sha256: digests of the shards and of the judge's file (empty without one).
        losses_sha256: digest of every logged loss, in hexadecimal.
        weights_sha256: digest of the final weights and their average.
        right, total: number of right results, and of all results.
        right_by_seed: `right` of each further seed.
        machine, torch: processor, and version of torch.
    """

    track: str
    change: str
    factory: str
    overrides: list[str]
    ranks: int
    revision: str
    process_s: float
    wall_s: float
    steps: int
    data_sha256: str
    judge_sha256: str
    losses_sha256: str
    weights_sha256: str
    right: int
    total: int
    right_by_seed: dict[str, int]
    machine: str
    torch: str

    @property
    def results(self) -> list[int]:
        """Number of right results of each seed."""
        return [self.right, *self.right_by_seed.values()]

    @property
    def seeds_at_mark(self) -> str:
        """Number of seeds that reach the mark of the track, of all seeds."""
        reached = sum(right >= TRACKS[self.track].mark * self.total for right in self.results)
        return f"{reached} of {len(self.results)}"

    def row(self, name: str = "") -> str:
        """Return the row of the table of records."""
        low, high = (f"{100 * right / self.total:.1f}" for right in (min(self.results), max(self.results)))
        cells = (
            f"[{name}]({self.track}/{name}.json)" if name else "",
            self.change,
            f"{self.process_s:,.0f} s",
            f"{low} to {high} %",
        )
        return f"| {' | '.join(cells)} |"

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read a record."""
        try:
            return cls(**parse_json(read_bytes(path)))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{path} is not a record of this race: {error}; give a record.json of this command"
            ) from error


def differences(claimed: Record, measured: Record) -> list[str]:
    """Return a line for each difference of a replay; an empty list confirms the record."""
    lines = [
        f"{name}: claimed {getattr(claimed, name)}, measured {getattr(measured, name)}: {why}"
        for name, why in TO_THE_BIT.items()
        if getattr(claimed, name) != getattr(measured, name)
    ]
    slower = measured.process_s > SLOWER * claimed.process_s
    if slower and measured.machine == claimed.machine:
        lines.append(
            f"process_s: claimed {claimed.process_s:,.0f} s, measured {measured.process_s:,.0f} s: more than "
            f"{SLOWER:g} times as long on the same machine"
        )
    if lines:
        lines += [
            f"{name}: claimed {getattr(claimed, name)}, now {getattr(measured, name)}, which may round differently"
            for name in ("machine", "torch", "revision")
            if getattr(claimed, name) != getattr(measured, name)
        ]
    return lines


def records(track: str) -> list[Record]:
    """Return the records of a track, oldest first."""
    files = sorted((FOLDER / track).glob("*.json"), key=lambda file: int(file.stem))
    return [Record.load(file) for file in files]


def page() -> str:
    """Return the text of README.md with a table of the records of each track."""
    rules, heading, _ = read_bytes(PAGE).decode().partition(HEADING)
    text = f"{rules}{heading}\nAll five seeds of a record pass; its file has settings and revision. Other work on the "
    text += "machine changes CPU times by up to 20 %.\n\n"
    text += f"![CPU time of the records]({PLOT.name})\n"
    for track, judged in TRACKS.items():
        rows = records(track)
        machines = sorted({f"{row.machine}, torch {row.torch}" for row in rows})
        text += f"\n### {track.capitalize()}\n\nMeasured on {'; '.join(machines)}.\n\n"
        text += f"| record | change | CPU time | {judged.unit} |\n"
        text += "|---|---|---|---|\n"
        text += "".join(f"{row.row(str(number))}\n" for number, row in enumerate(rows, 1))
    return text


def plot(path: Path) -> None:
    """Draw the CPU time of the records of each track, oldest first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, track in zip(figure.subplots(1, len(TRACKS), squeeze=False)[0], TRACKS, strict=True):
        rows = records(track)
        axes.plot(range(1, len(rows) + 1), [row.process_s for row in rows], "o-", drawstyle="steps-post")
        for number, row in enumerate(rows, 1):
            text = f"{row.process_s:,.0f} s"
            axes.annotate(text, (number, row.process_s), xytext=(4, 4), textcoords="offset points", fontsize=8)
        axes.set_xticks(range(1, len(rows) + 1))
        axes.set(title=track, xlabel="record", ylabel="CPU time (s)")
        axes.margins(0.15)
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=100, metadata={"Software": None})
