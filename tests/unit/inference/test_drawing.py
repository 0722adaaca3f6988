"""A drawn sample depends on its seed and number, not on its batch, on its neighbours, or on the ranks."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from dit.inference.drawing import Request, batches, draw, numbered
from dit.inference.gallery import Gallery
from dit.inference.generator import Generator
from dit.sampling.grid import to_bytes
from tests.conftest import BuildModel
from tests.unit.sampling.test_frame_rate import CONDITIONED, generator_of

ROUNDING = 1e-5  # fp32: matrix products over another batch add in another order
SEEDS = [None, 5, None, 2**40, 5]


@pytest.fixture
def generator(build_model: BuildModel) -> Generator:
    return generator_of(build_model(CONDITIONED["rate"], perturb=0.1), CONDITIONED["rate"])


def requests(seeds: list, count: int = 2) -> list[Request]:
    pairs = numbered(seeds, count)
    return [Request(f"{i}", {"label": i // count % 3}, {}, seed, number) for i, (seed, number) in enumerate(pairs)]


def drawn(generator: Generator, asked: list[Request], batch_size: int, world_size: int = 1) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for rank in range(world_size):
        for indices, latents in draw(generator, asked, batch_size=batch_size, rank=rank, world_size=world_size, seed=3):
            assert not found.keys() & set(indices), "drawn twice"
            found |= dict(zip(indices, latents, strict=True))
    return found


def test_samples_do_not_depend_on_the_ranks_and_hardly_on_the_batch(generator: Generator) -> None:
    """Equal to the bit over 1, 2 and 3 ranks; to rounding in batches of another size."""
    asked = requests(SEEDS)
    one = drawn(generator, asked, 3)
    assert sorted(one) == list(range(10))
    for world_size in (2, 3):
        other = drawn(generator, asked, 3, world_size)
        assert all(torch.equal(other[i], one[i]) for i in one)
    alone = drawn(generator, asked, 1)
    for i in one:
        torch.testing.assert_close(alone[i], one[i], rtol=0, atol=ROUNDING)


def test_references_count_in_the_size_of_a_batch(generator: Generator) -> None:
    """All samples count as the one with most tokens."""
    latent = torch.zeros(4, 1, 6, 6)
    samples = [(), (latent,), (latent, latent)]
    assert generator.batch_size(1, (6, 6), samples) == generator.batch_size(1, (6, 6)) // 3


def test_a_sample_with_a_seed_does_not_depend_on_other_samples(generator: Generator) -> None:
    together = drawn(generator, requests(SEEDS), 10)
    alone = generator.generate([1, 1], seed=5)
    for i in (0, 1):
        torch.testing.assert_close(together[2 + i], alone[i], rtol=0, atol=ROUNDING)
    # A large seed is not truncated; samples without a seed are numbered as if no sample had one.
    torch.testing.assert_close(together[6], generator.generate([0], seed=2**40)[0], rtol=0, atol=ROUNDING)
    plain = drawn(generator, requests([None] * 5), 10)
    for i in (0, 1, 4, 5):
        torch.testing.assert_close(together[i], plain[i], rtol=0, atol=ROUNDING)
    assert (together[0] - together[1]).abs().max() > 0.1


def test_equal_seeds_per_sample_equal_one_common_seed(generator: Generator) -> None:
    """To the bit: seeds per sample that are all equal give the noise of one common seed."""
    assert torch.equal(generator.generate([0, 1, 2], seeds=[11] * 3), generator.generate([0, 1, 2], seed=11))


def test_samples_with_and_without_negatives_are_in_different_batches() -> None:
    negative = {"context": torch.zeros(1, 6)}
    asked = [Request("", {"label": 0}, negative if i in (1, 2, 5) else {}, None, i) for i in range(6)]
    assert batches(asked, 2) == [[0], [1, 2], [3, 4], [5]]


def test_steps_are_counted_for_every_batch(generator: Generator) -> None:
    steps: list[tuple[int, int]] = []
    list(draw(generator, requests([None] * 3), batch_size=4, on_step=lambda *step: steps.append(step), solver="heun"))
    assert sorted(set(steps)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_gallery_writes_a_file_and_a_record_for_each_sample(tmp_path: Path) -> None:
    pictures = torch.rand(3, 3, 1, 5, 4) * 2 - 1
    records = [{"prompt": name, "seed": 7} for name in "abc"]
    gallery = Gallery(list("abc"), records, folder=tmp_path / "files", keep_latents=True, clip_ending=".gif")
    gallery.add([2, 0], pictures[[2, 0]], pictures[[2, 0]])
    gallery.add([1], pictures[1:2], pictures[1:2])
    assert gallery.gather()
    gallery.save_record()
    gallery.save_latents(tmp_path / "x.safetensors", {"autoencoder": "v"})
    gallery.save_grid(tmp_path / "x.png", None, None)
    lines = [json.loads(line) for line in (tmp_path / "files" / "samples.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == list("abc")
    for line, pixels in zip(lines, pictures):
        with Image.open(tmp_path / "files" / line["file"]) as image:
            assert image.size == (4, 5)
            assert list(image.getdata()) == [tuple(p) for p in to_bytes(pixels[:, 0]).flatten(0, 1).tolist()]
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("latents"), pictures)
        assert file.metadata() == {"autoencoder": "v"}


@pytest.mark.parametrize("ending", [".gif", ".mp4"])
def test_a_clip_is_an_animation_at_the_requested_rate(tmp_path: Path, ending: str) -> None:
    """The grid is a still picture with the frames of each clip in a row."""
    clips = torch.stack([torch.full((3, 3, 16, 16), level) for level in (-1.0, 1.0)])
    clips[:, :, 1] = 0
    gallery = Gallery(["a", "b"], [{}, {}], folder=tmp_path, fps=5.0, clip_ending=ending)
    gallery.add([0, 1], clips, clips)
    gallery.save_grid(tmp_path / "grid.png", None, None)
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (3 * (64 + 4) + 4, 2 * (64 + 16 + 4) + 4)
    if ending == ".gif":
        gallery.save_grid(tmp_path / "grid.gif", None, 1)
        assert Image.open(tmp_path / "grid.gif").size == (64 + 2 * 4, 2 * (64 + 16 + 4) + 4)
        with Image.open(tmp_path / "000001.gif") as film:
            assert (film.n_frames, film.info["duration"], film.size) == (3, 200, (16, 16))
        return
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "000001.mp4")) as film:
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
        assert film.streams.video[0].average_rate == 5
    assert [round(float(frame.mean()) / 64) for frame in frames] == [4, 2, 4]


def test_a_grid_shows_the_first_pictures_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dit.inference.gallery.GRID_PIXELS", 40)
    gallery = Gallery(list("abc"), [{}] * 3, clip_ending=".gif")
    for i in range(3):
        gallery.add([i], torch.zeros(1, 1, 1, 4, 4), torch.zeros(1, 1, 1, 4, 4))
    gallery.save_grid(tmp_path / "x.png", 1, None)
    assert gallery.shown == 2
