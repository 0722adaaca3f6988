"""Data sets of the library `datasets` become shards: parquet with pictures, saved folders, folders of files."""

import json
import pickle
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from dit.errors import EXIT_CONFIG, EXIT_DATA, EXIT_OK
from energon_data.prepare.huggingface import Table, prepare_huggingface
from energon_data.prepare.media import Options
from tests.unit.energon_data import preparations
from tests.unit.energon_data.preparations import folder_of, metadata_of, png, samples, write_list

COUNT = 6
prepare, described = (partial(f, command="huggingface") for f in (preparations.run, preparations.described))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Give the test an empty cache, which is removed afterwards."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", tmp_path / "cache")


def rows(count: int = COUNT) -> dict[str, list]:
    return {
        "image": [{"bytes": png(10 * i, 32), "path": f"{i}.png"} for i in range(count)],
        "text": [f"shade {i}" for i in range(count)],
        "score": [0.5 * i for i in range(count)],
    }


def write_parquet(path: Path, columns: dict[str, list]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)
    return path


def stored(folder: Path) -> list[bytes]:
    """Return the picture files of a prepared folder, in the order of the rows."""
    return [parts["pixels.png"] for _, _, _, parts in sorted(samples(folder), key=lambda sample: sample[1]["source"])]


def parquet_file(root: Path) -> Path:
    return write_parquet(root / "x.parquet", rows())


def parquet_folder(root: Path) -> Path:
    return write_parquet(root / "hub" / "data" / "train-00000-of-00001.parquet", rows()).parents[1]


def saved_split(root: Path) -> Path:
    features = datasets.Features(
        {"image": datasets.Image(), "text": datasets.Value("string"), "score": datasets.Value("float64")}
    )
    datasets.Dataset.from_dict(rows(), features=features).save_to_disk(root / "saved")
    return root / "saved"


def saved_splits(root: Path) -> Path:
    split = datasets.load_from_disk(saved_split(root))
    datasets.DatasetDict({"train": split, "test": split.select([0])}).save_to_disk(root / "splits")
    return root / "splits"


def image_folder(root: Path) -> Path:
    """Write a folder with a list for the library's `imagefolder`; its rows name files instead of containing bytes."""
    folder = folder_of(root / "files", {f"{i}.png": png(10 * i, 32) for i in range(COUNT)})
    return write_list(folder, ({"file_name": f"{i}.png", "text": f"shade {i}", "score": 0.5 * i} for i in range(COUNT)))


@pytest.mark.parametrize("make", [parquet_file, parquet_folder, saved_split, saved_splits, image_folder])
def test_every_row_is_a_sample_with_its_file_its_caption_and_its_scalars(tmp_path, make):
    described(make(tmp_path), tmp_path / "out")
    found = metadata_of(tmp_path / "out")
    assert [(found[f"train/{i:08d}"]["caption"], found[f"train/{i:08d}"]["score"]) for i in range(COUNT)] == [
        (f"shade {i}", 0.5 * i) for i in range(COUNT)
    ]
    assert stored(tmp_path / "out") == [png(10 * i, 32) for i in range(COUNT)]


def test_each_shard_has_rows_of_all_classes_of_a_sorted_table(tmp_path):
    """A stream reads a part of the shards, and its buffer mixes only some of them."""
    source = write_parquet(tmp_path / "x.parquet", {"image": [png(0)] * 60, "label": [0] * 30 + [1] * 30})
    described(source, tmp_path / "out", "--samples-per-shard", "20")
    labels = [about["label"] for _, about, *_ in samples(tmp_path / "out")]
    assert all({0, 1} == set(labels[i : i + 20]) for i in (0, 20, 40))


def test_columns_are_named_and_captions_may_be_lists(tmp_path):
    """Shards have all captions, and training draws one. Plain bytes, as img2dataset writes them, are files, too."""
    columns = {
        "jpg": [png(i, 32) for i in range(3)],
        "thumbnail": [png(0, 32) for _ in range(3)],
        "sentences": [["one", "two "], [], None],
        "kind": [2, 0, -1],
    }
    source = write_parquet(tmp_path / "x.parquet", columns)
    words = ["--image-column", "jpg", "--caption-column", "sentences", "--label-column", "kind"]
    found = described(source, tmp_path / "out", *words)
    assert (found["labelled"], found["num_classes"]) == (2, 3)
    about = metadata_of(tmp_path / "out")
    assert about["train/00000000"]["captions"] == ["one", "two"]
    assert "caption" not in about["train/00000001"]
    assert [about[f"train/{i:08d}"].get("label") for i in range(3)] == [2, 0, None]
    assert stored(tmp_path / "out") == [png(0, 32), png(1, 32), png(2, 32)]


def test_classes_have_the_names_of_the_data_set(tmp_path):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    split = {"image": rows(2)["image"], "label": [1, 0]}
    datasets.Dataset.from_dict(split, features=features).to_parquet(tmp_path / "x.parquet")
    found = described(tmp_path / "x.parquet", tmp_path / "out")
    assert (found["class_names"], found["num_classes"]) == (["cat", "dog"], 2)


def test_rows_with_a_missing_or_damaged_picture_are_named_and_skipped(tmp_path, capsys):
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(255, 32))
    pictures = [
        {"bytes": png(1, 32), "path": None},
        None,
        {"bytes": None, "path": None},
        {"bytes": b"no picture", "path": "x.png"},
        {"bytes": png(2, 32)[:40], "path": None},
        {"bytes": None, "path": str(secret)},
        {"bytes": None, "path": "relative.png"},
    ]
    source = write_parquet(tmp_path / "in" / "x.parquet", {"image": pictures, "caption": ["text"] * len(pictures)})
    found = described(source, tmp_path / "out")
    assert found["skipped"] == {"missing_part": 3, "bad_image": 2, "path_escape": 1}
    lines = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == [f"train/{i:08d}" for i in range(1, 7)]
    assert "skipped, path_escape: 1; train/00000005: secret.png is a link to a file outside" in capsys.readouterr().out
    followed = described(source, tmp_path / "followed", "--follow-links")
    assert followed["skipped"] == {"missing_part": 3, "bad_image": 2}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--image-column", "imgae"], "no such column among image, text, score; did you mean image?"),
        (["--caption-column", "label"], "no such column among image, text, score; name one of them"),
        (
            ["--image-column", "text"],
            "--image-column text has string, not files of pictures; if these are URLs",
        ),
        (["--split", "tarin"], "has no split 'tarin', only train; did you mean train?"),
    ],
)
def test_a_missing_column_or_split_is_refused_in_one_line(tmp_path, capsys, words, says):
    assert prepare(parquet_file(tmp_path), tmp_path / "out", *words) == EXIT_CONFIG
    assert says in (said := capsys.readouterr().err)
    assert said.count("\n") == 2  # with "preparing ..."
    assert not list(tmp_path.glob("*out*"))


def test_the_error_for_no_or_two_picture_columns_lists_all_columns(tmp_path, capsys):
    write_parquet(tmp_path / "urls.parquet", {"url": ["https://x/1.jpg"], "caption": ["text"]})
    assert prepare(tmp_path / "urls.parquet", tmp_path / "out") == EXIT_CONFIG
    assert "no column has pictures; name one of url, caption with --image-column" in capsys.readouterr().err
    picture = rows(1)["image"]
    write_parquet(tmp_path / "two.parquet", {"before": picture, "after": picture})
    assert prepare(tmp_path / "two.parquet", tmp_path / "out") == EXIT_CONFIG
    assert "several columns have pictures: before, after; name one" in capsys.readouterr().err


def test_a_damaged_file_is_one_line(tmp_path, capsys):
    source = parquet_file(tmp_path)
    source.write_bytes(source.read_bytes()[:200])
    assert prepare(source, tmp_path / "out") in (EXIT_CONFIG, EXIT_DATA)
    said = capsys.readouterr().err
    assert said.count("\n") == 2  # with "preparing ..."
    assert "x.parquet cannot be" in said


def test_code_of_a_data_set_is_not_executed(tmp_path, capsys):
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert prepare(folder, tmp_path / "out") == EXIT_CONFIG
    assert capsys.readouterr().err.count("\n") == 2  # with "preparing ..."
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "says"), [("someone/no-such-data", "cannot be reached"), ("data/no/such", "not a folder, a file")]
)
def test_a_name_on_the_hub_without_a_network_is_one_line(tmp_path, capsys, monkeypatch, name, says):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert prepare(name, tmp_path / "out") == EXIT_CONFIG
    assert says in (said := capsys.readouterr().err)
    assert name in said
    assert said.count("\n") == 2  # with "preparing ..."


@pytest.mark.parametrize("make", [parquet_folder, saved_splits])
def test_links_out_of_the_folder_are_read_with_follow_links_only(tmp_path, capsys, make):
    """The folder has links to files, or to folders."""
    (tmp_path / "elsewhere").mkdir()
    source, linked = make(tmp_path / "elsewhere"), tmp_path / "in"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    assert prepare(linked, tmp_path / "out") == EXIT_DATA
    assert f" is outside of {linked}; --follow-links reads it" in capsys.readouterr().err
    assert described(linked, tmp_path / "followed", "--follow-links")["samples"] == {"train": COUNT}


def test_a_saved_data_set_reads_only_its_own_files(tmp_path, capsys):
    saved = saved_split(tmp_path)
    state = json.loads((saved / "state.json").read_text())
    (data,) = state["_data_files"]
    (saved / data["filename"]).rename(tmp_path / "outside.arrow")
    data["filename"] = "../outside.arrow"
    (saved / "state.json").write_text(json.dumps(state))
    assert prepare(saved, tmp_path / "out") == EXIT_DATA
    assert f"outside.arrow is outside of {saved}; --follow-links reads it" in capsys.readouterr().err
    assert prepare(saved, tmp_path / "followed", "--follow-links") == EXIT_OK


def test_a_hub_name_reads_the_data_set_of_the_datasets_library(tmp_path, monkeypatch):
    """A local builder replaces that of the repository; its splits are those of a `DatasetDict`."""
    folder, names = parquet_folder(tmp_path), []
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", rows(2))
    assert isinstance(datasets.load_dataset(str(folder)), datasets.DatasetDict)
    builder = datasets.load_dataset_builder

    def of_hub(path: str, **words: object) -> datasets.DatasetBuilder:
        names.append(path)
        return builder(str(folder), **words)

    monkeypatch.setattr(datasets, "load_dataset_builder", of_hub)
    monkeypatch.setattr("energon_data.prepare.huggingface.check_reachable", lambda source: None)
    assert described("owner/name", tmp_path / "out")["samples"] == {"train": COUNT}
    assert described("owner/name", tmp_path / "test", "--split", "test")["samples"] == {"train": 2}
    assert names == ["owner/name"] * 2


@pytest.mark.parametrize("make", [parquet_file, saved_split])
def test_worker_processes_get_files_instead_of_rows(tmp_path, make):
    prepared = prepare_huggingface(str(make(tmp_path)), tmp_path / "out", Options(), Table())
    source = prepared.job.sources.args[0]
    sent = pickle.dumps(prepared.job)
    assert len(sent) < 20_000
    assert png(10, 32) not in sent
    assert pickle.loads(sent).sources.args[0](1).read() == source(1).read() == png(10, 32)
