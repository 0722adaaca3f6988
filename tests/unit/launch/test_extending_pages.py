"""docs/adding-a-*.md: the files that they show are written to a folder, and their commands run there as described."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dit.verify.ranks import run_world
from energon_data.prepare import shards
from launch import cli
from launch.config_file import built
from launch.train import resolve
from launch.verify import Pair, build_parser, compare, world_size_of
from tests.support.ranks import Job, one_step, run_jobs
from tests.unit.launch import pages

PAGES = [Path(f"docs/adding-{what}.md") for what in ("a-backbone", "an-objective", "a-condition", "a-data-source")]
LINES = [line for page in PAGES for line in pages.shown_commands(page)]
VERIFY = "python -m launch.verify "
STATED = (
    "        replicate_on_all_stages(self.parameters())  # sum the gradients of the copies on all pipeline stages\n"
)


def write_camera(path: Path) -> None:
    """Write forty samples with class and camera motion."""
    rng = np.random.default_rng(0)
    with shards.published_folder(path, force=True) as folder:
        writer = shards.ShardWriter(folder, "train", samples_per_shard=20)
        for i in range(40):
            arrays = {"latent": rng.standard_normal((4, 1, 16, 16)), "camera": rng.standard_normal(3)}
            parts = {f"{name}.npy": shards.npy_bytes(x.astype(np.float32)) for name, x in arrays.items()}
            writer.add(f"sample_{i:03d}", {"label": i % 10}, parts)
        writer.close()
        shards.write_dataset_file(folder, {"format": 1, "shards": writer.shards})
        shards.write_energon_metadata(folder, writer.shards, ["train"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the files of the pages, and a copy of the backbone without the line `STATED`."""
    folder = tmp_path_factory.mktemp("extending")
    files = {name: text for page in PAGES for name, text in pages.shown_files(page).items()}
    assert STATED in files["side_by_side.py"]
    files["not_stated.py"] = files["side_by_side.py"].replace(STATED, "")
    for name, text in files.items():
        (folder / name).write_text(text)
    np.save(folder / "motion.npy", np.ones(3, np.float32))
    write_camera(folder / "data" / "camera")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


def pair_of(line: str) -> Pair:
    """Return the two runs that a `launch.verify` command compares."""
    args = build_parser().parse_args(shlex.split(line.removeprefix(VERIFY)))
    config = built(resolve(cli.Options(factory=args.factory, overrides=args.overrides)))
    return one_step(config, world_size_of(config.parallel, args.world_size))


@pytest.fixture(scope="module")
def verdicts(folder, tmp_path_factory):
    """Verdict of each `launch.verify` command of the pages; each world size starts once."""
    lines = [line for line in LINES if line.startswith(VERIFY)]
    faulty = next(line for line in lines if "pipeline" in line and "side_by_side" in line)
    lines.append(faulty.replace("side_by_side", "not_stated"))
    pairs = {line: pair_of(line) for line in lines}
    assert {pair.world_size for pair in pairs.values()} == {2}
    logs = tmp_path_factory.mktemp("verify")
    tasks = [[{"task": "dit.verify.trial:run_case", "trial": t} for t in (p.one, p.many)] for p in pairs.values()]
    one, many = (run_world(n + 1, [task[n] for task in tasks], logs / str(n)) for n in (0, 1))
    return {line: compare(pair, *found) for (line, pair), *found in zip(pairs.items(), one, many)}


@pytest.fixture(scope="module")
def ended(folder, tmp_path_factory):
    """Results of all other commands of the pages; one process runs them in order, as a reader does."""
    quick = {"launch.train": " logging.tensorboard=False", "launch.sample": " --steps 2"}
    quick["data=energon"] = " data.background=False"
    jobs = {
        line: Job(
            pages.run_line,
            {"line": line + "".join(more for part, more in quick.items() if part in line), "folder": folder},
        )
        for line in LINES
        if not line.startswith(VERIFY)
    }
    return run_jobs(tmp_path_factory.mktemp("commands"), jobs)


@pytest.mark.parametrize("line", [line for line in LINES if not line.startswith(VERIFY)])
def test_a_command_of_the_page_has_the_described_result(ended, folder, line):
    assert ended[line].code == 0, ended[line].err
    if "--yes" in line:
        assert "finished step 4 of 4" in ended[line].err + ended[line].out
        module = line.partition("--factory ")[2].partition(".")[0]
        assert (
            f"draw from it: DIT_PACKAGES={module} python -m launch.sample --checkpoint runs/"
            in ended[line].err + ended[line].out
        )
    if "--out" in line:
        assert "grid.png: 2 samples" in ended[line].out


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith(VERIFY)])
def test_the_layouts_of_the_page_equal_one_rank(verdicts, line):
    assert verdicts[line].is_equal
    assert verdicts[line].idle == ()
    if "side_by_side" in line:
        assert verdicts[line].text().endswith("equal: 31 gradients, losses, weights and their copies")


def test_an_undeclared_replica_on_all_stages_is_named_with_its_cure(verdicts):
    """The verdict has the first wrong parameter, the number of stages with a copy, and the function to call."""
    (verdict,) = (verdicts[line] for line in verdicts if "not_stated" in line)
    assert verdict.wrong[0].row.name == "conditioner.label.weight"
    assert "2 pipeline stages have a copy" in verdict.reading()
    assert "replicate_on_all_stages(module.parameters())" in verdict.reading()
