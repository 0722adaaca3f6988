"""The classifier of letters learns shapes, and is trained again if its data change."""

import pytest
import torch

from dit.errors import DataError
from examples.letters import reader as letter_reader

SIZE = 8


def bars(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy pictures of three shapes: a vertical bar, a horizontal bar and a cross."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    images = torch.full((count, 1, SIZE, SIZE), -1.0)
    images[labels != 1, :, :, 3:5] = 1.0
    images[labels != 0, :, 3:5, :] = 1.0
    return (images + 0.1 * torch.randn(images.shape, generator=generator)).clamp(-1, 1), labels


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A stand-in for a prepared data set; `content["seed"]` changes its content."""
    content = {"seed": 1}

    def load(path, split):
        images, labels = bars(256 if split == "train" else 64, content["seed"] + (split == "val"))
        return images, labels, [{"label": label, "letter": "ABC"[label]} for label in labels.tolist()]

    monkeypatch.setattr("examples.letters.loading.load_letters", load)
    monkeypatch.setattr(letter_reader, "NUM_STEPS", 60)
    monkeypatch.setattr(letter_reader.train_reader, "__kwdefaults__", {"num_steps": 60, "seed": 0})
    return tmp_path, content


def test_the_reader_generalises_and_survives_saving(folder, monkeypatch):
    path, content = folder
    reader = letter_reader.load_reader(path)
    assert reader.accuracy > 0.9
    assert reader.class_names == ("A", "B", "C")
    images, labels = bars(100, seed=9)
    assert (reader.read_letters(images) == labels).float().mean() > 0.9

    trained = []
    monkeypatch.setattr(letter_reader, "train_reader", lambda *a, **k: trained.append(a) or reader.network)
    again = letter_reader.load_reader(path)
    assert not trained
    assert torch.equal(again.read_letters(images), reader.read_letters(images))
    content["seed"] = 5
    letter_reader.load_reader(path)
    assert len(trained) == 1
    (path / letter_reader.FILE).write_bytes(b"damaged")
    letter_reader.load_reader(path)
    assert len(trained) == 2


def test_reader_training_is_deterministic_and_does_not_change_the_global_generator():
    images, labels = bars(64, seed=1)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = (letter_reader.train_reader(images, labels, 3, num_steps=2) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(first.state_dict().values(), second.state_dict().values()):
        assert torch.equal(a, b)


def test_the_digest_depends_on_values_shapes_and_order():
    a, b = torch.zeros(2, 3), torch.ones(2, 3)
    digests = {letter_reader.digest_of(*t) for t in ((a, b), (b, a), (a,), (a.view(3, 2), b), (a.double(), b))}
    assert len(digests) == 5


def test_variations_are_valid_pictures():
    images, _ = bars(32, seed=2)
    varied = letter_reader.vary(images, torch.Generator().manual_seed(0))
    assert varied.shape == images.shape
    assert varied.min() >= -1
    assert varied.max() <= 1
    assert not torch.equal(varied[:16], varied[16:])


def test_a_folder_without_letters_is_a_data_error(tmp_path, capsys):
    with pytest.raises(DataError):
        letter_reader.load_reader(tmp_path / "nothing")
    assert letter_reader.main(["--data", str(tmp_path / "nothing")]) == 3
    assert "energon_data.prepare letters" in capsys.readouterr().err
