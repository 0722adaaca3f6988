"""Folders as kohya's trainers read them: repeats by folder, tags, `.caption` files, text around captions."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from dit.batch import PackedBatch
from dit.errors import EXIT_DATA, EXIT_OK, ConfigError
from energon_data.dataset import EnergonData
from energon_data.folder import check_folder
from energon_data.prepare.wording import Wording
from tests.unit.energon_data.preparations import description, folder_of, metadata_of, png, samples
from tests.unit.energon_data.preparations import run as prepare
from tests.unit.energon_data.small_data import spec


def kohya_folder(root: Path) -> Path:
    """Two pictures with tags that are read five times, and four that are read once, one of them with a caption."""
    files: dict[str, bytes | str] = {f"1_dog/{i}.png": png(i) for i in range(4)}
    files |= {"1_dog/0.caption": "a dog", "1_dog/1.caption": "not this one", "1_dog/1.txt": "this one"}
    for i in range(2):
        files |= {f"5_sks dog/{i}.png": png(i), f"5_sks dog/{i}.txt": "sks dog, grass, sky, ball"}
    return folder_of(root / "img", files)


def captions(folder: Path) -> dict[str, list[str]]:
    return {name: about.get("captions", [about.get("caption")]) for name, about in metadata_of(folder).items()}


def test_captions_of_files_override_those_of_their_folders(tmp_path):
    assert prepare(kohya_folder(tmp_path), tmp_path / "out", "--repeats") == EXIT_OK
    assert captions(tmp_path / "out") == {
        "1_dog/0.png": ["a dog"],
        "1_dog/1.png": ["this one"],
        "1_dog/2.png": ["dog"],
        "1_dog/3.png": ["dog"],
        "5_sks dog/0.png": ["sks dog, grass, sky, ball"],
        "5_sks dog/1.png": ["sks dog, grass, sky, ball"],
    }


def keys_of(stream: Iterator[PackedBatch], count: int) -> list[str]:
    return [key for batch in islice(stream, count) for key in batch.keys]


def test_repeats_are_reads_not_copies(tmp_path, capsys):
    """In each pass over the training data, the folder sets how often a picture is read, even after a resume."""
    assert prepare(kohya_folder(tmp_path), tmp_path / "out", "--repeats") == EXIT_OK
    assert "train: 6 samples, read 14 times in one pass (repeats)" in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("*.tar"))) == 2
    assert description(tmp_path / "out")["samples"] == {"train": 6}
    assert check_folder(tmp_path / "out", "train").samples == 14
    asked = spec(num_classes=None, context_size=None, latent_channels=3, micro_batch_size=1)
    data = EnergonData(path=str(tmp_path / "out"), shuffle_buffer=0, background=False)

    def stream():
        return data.build_train(asked, dp_rank=0, dp_size=1, seed=0, log_dir=None)

    first = stream()
    read = keys_of(first, 20)
    state = first.state_dict()
    read += (rest := keys_of(first, 8))
    second = stream()
    second.load_state_dict(state)
    assert keys_of(second, 8) == rest
    for some in (first, second):
        some.close()
    assert sorted(Counter(read).values()) == [2, 2, 2, 2, 10, 10]
    assert {key for key, count in Counter(read).items() if count == 10} == {
        key for key in read if key.startswith("5-sks-dog")
    }


def test_held_out_files_are_not_repeated(tmp_path):
    source = kohya_folder(tmp_path)
    for i in range(2, 40):
        (source / "5_sks dog" / f"{i}.png").write_bytes(png(i))
    assert prepare(source, tmp_path / "out", "--repeats", "--validation", "0.3") == EXIT_OK
    shards = description(tmp_path / "out")["shards"]
    assert {facts.get("repeats", 1) for name, facts in shards.items() if name.startswith("val-")} == {1}
    assert {facts.get("repeats", 1) for name, facts in shards.items() if name.startswith("train-")} == {1, 5}
    counts = [facts["samples"] for name, facts in shards.items() if name.startswith("val-")]
    assert check_folder(tmp_path / "out", "val").samples == sum(counts)


@pytest.mark.parametrize(
    ("name", "says"),
    [("dog", "is not called N_NAME"), ("0_dog", "N from 1 to 1000"), ("9999_dog", "N from 1 to 1000")],
)
def test_a_folder_that_states_no_repeats_is_refused_by_name(tmp_path, capsys, name, says):
    (kohya_folder(tmp_path) / "1_dog").rename(tmp_path / "img" / name)
    assert prepare(tmp_path / "img", tmp_path / "out", "--repeats") == EXIT_DATA
    assert says in (said := capsys.readouterr().err)
    assert f"img/{name}" in said
    assert said.count("\n") == 2  # with "preparing ..."


def test_a_file_outside_of_the_folders_is_refused(tmp_path, capsys):
    (kohya_folder(tmp_path) / "stray.png").write_bytes(png(0))
    assert prepare(tmp_path / "img", tmp_path / "out", "--repeats") == EXIT_DATA
    expected = f"1 file in no folder N_NAME, such as {tmp_path}/img/stray.png; move them into folders"
    assert expected in capsys.readouterr().err


# Tags and text around captions.

TAGS = "1girl, solo,long hair, , smile, hat, sky, sea"


def test_shuffled_tags_keep_the_first_tags_and_start_with_the_original_caption():
    wording = Wording(tag_orders=20, keep_tags=2)
    orders = wording.apply([TAGS], "a.png")
    assert orders[0] == TAGS
    assert len(set(orders)) == len(orders) == 20
    tags = [order.split(", ") for order in orders[1:]]
    assert all(some[:2] == ["1girl", "solo"] for some in tags)
    assert all(sorted(some[2:]) == ["hat", "long hair", "sea", "sky", "smile"] for some in tags)
    assert wording.apply([TAGS], "a.png") == orders
    assert wording.apply([TAGS], "b.png")[1:] != orders[1:]


@pytest.mark.parametrize(
    ("caption", "count"), [("one", 1), ("a, b", 2), ("a,b, c", 6), ("a, a", 1), ("x, x, x, x, x, x, x", 1)]
)
def test_a_caption_of_few_tags_has_every_possible_order(caption, count):
    orders = Wording(tag_orders=50).apply([caption], "a.png")
    assert orders[0] == caption
    assert len(set(orders)) == len(orders) == count


@pytest.mark.parametrize(
    ("prefix", "caption"), [("sks style,", "sks style, a cat"), ("photo of ", "photo of a cat"), ("", "a cat")]
)
def test_text_before_captions_is_joined_by_a_space(prefix, caption):
    assert Wording(prefix=prefix).apply(["a cat"], "a.png") == (caption,)
    assert Wording(prefix=prefix).apply([], "a.png") == ()
    assert Wording(default="a cat", prefix=prefix).apply([], "a.png") == (caption,)


def test_shuffled_captions_are_stored_with_their_embeddings(tmp_path):
    words = ["--repeats", "--shuffle-tags", "3", "--keep-tags", "1", "--caption-prefix", "photo,"]
    assert prepare(kohya_folder(tmp_path), tmp_path / "out", *words, "--text-encoder", "identity") == EXIT_OK
    found = captions(tmp_path / "out")
    assert found["1_dog/2.png"] == ["photo, dog"]
    orders = found["5_sks dog/0.png"]
    assert orders[0] == "photo, sks dog, grass, sky, ball"
    assert len(set(orders)) == 3
    assert all(order.startswith("photo, sks dog, ") for order in orders)
    names = Counter(name for *_, parts in samples(tmp_path / "out") for name in parts if name.startswith("text"))
    assert names == {"text.npy": 6, "text-1.npy": 2, "text-2.npy": 2}
    assert prepare(tmp_path / "out", tmp_path / "again", "--size", "16", command="webdataset") == EXIT_OK
    assert sorted(captions(tmp_path / "again").values()) == sorted(captions(tmp_path / "out").values())


@pytest.mark.parametrize(
    "settings", [{"tag_orders": 0}, {"tag_orders": 101}, {"keep_tags": 1}, {"tag_orders": 2, "keep_tags": -1}]
)
def test_impossible_orders_are_refused_by_name(settings):
    with pytest.raises(ConfigError, match=r"--(shuffle|keep)-tags"):
        Wording(**settings)
