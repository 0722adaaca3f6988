"""Read pictures with the library `datasets`, from the Hugging Face hub or local files.

    NAME, OWNER/NAME          on the hub, downloaded to its local cache
    FOLDER                    with parquet or arrow files, or made by `save_to_disk`
    FILE.parquet              as on the hub: a column of {"bytes": ..., "path": ...}, and a column of captions

A column of pictures has such entries or plain bytes, which `dit.media` decodes. Code in a data set is never run.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from dit.command_line import did_you_mean
from dit.errors import ConfigError, DataError
from dit.hub import check_reachable
from energon_data.prepare.media import Options
from energon_data.prepare.preparation import Preparation, sources_of
from energon_data.prepare.sources import (
    CAPTION_NAMES,
    Source,
    captions_of,
    check_inside,
    class_of,
    read_file,
    scalars_of,
)
from energon_data.samples import SampleError

if TYPE_CHECKING:
    from datasets import Dataset

NAME = "huggingface"
KINDS = ("arrow", "cache", "csv", "imagefolder", "json", "parquet", "webdataset")
"""Supported readers of `datasets`."""
_IMAGE, _LABEL = "image", "label"
_CAPTIONS = (*CAPTION_NAMES, "txt")
_SCALARS = re.compile(r"bool|u?int\d+|float\d+|(large_)?string(_view)?")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Selection of rows and columns of a data set.

    Attributes:
        image_column: column of pictures; None for the only one, or `image`.
        caption_column: column of captions, each a text or a list of texts; None for `caption`, `text`, `prompt` or
            `txt`, if there is one.
        label_column: column of class numbers; None for `label`, if it has numbers.
        reference_column: columns of the pictures that those of `image_column` are edited from; only the first one must
            have a picture in every row.
    """

    split: str = "train"
    config: Optional[str] = None
    image_column: Optional[str] = None
    caption_column: Optional[str] = None
    label_column: Optional[str] = None
    reference_column: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """An opened data set; pickling it copies file names, not rows.

    Attributes:
        table: the selected columns; None for those that the data set lacks.
        root: folder whose files rows may name; None for any.
    """

    dataset: "Dataset"
    table: Table
    root: Optional[Path]

    def source(self, number: int) -> Source:
        row, table = self.dataset[number], self.table
        entries = [row[name] for name in table.reference_column]
        references = entries[:1] + [
            entry for entry in entries[1:] if entry not in (None, {"bytes": None, "path": None})
        ]
        columns = table.image_column, table.caption_column, table.label_column
        stored, caption, label = (row.pop(column, None) for column in columns)
        return Source(
            name=self.name(number),
            read=partial(_picture, stored, self.root),
            captions=captions_of({"caption": caption}),
            label=class_of(None if label == -1 else label),  # -1 means no class
            metadata=scalars_of(row),
            references=tuple(partial(_picture, entry, self.root) for entry in references),
        )

    def name(self, number: int) -> str:
        return f"{self.table.split}/{number:08d}"


def _picture(stored: Any, root: Optional[Path]) -> bytes:
    """Return the file of a picture from the entry of a row: bytes, or a path."""
    data, path = (stored.get("bytes"), stored.get("path")) if isinstance(stored, dict) else (stored, None)
    if isinstance(data, bytes):
        return data
    if not isinstance(path, str) or not Path(path).is_absolute():
        raise SampleError("missing_part", "the row has no picture")
    return read_file(Path(path), root)


def prepare_huggingface(
    source: str,
    out: Path,
    options: Options,
    table: Table,
    *,
    follow_links: bool = False,
    samples_per_shard: int = 1000,
    validation: float = 0.02,
) -> Preparation:
    """Open a data set and return its preparation.

    Args:
        source: name on the hub, or path of a folder or parquet file.
        follow_links: also read files outside of `source` that links lead to or rows name.
    """
    dataset, root = _open(source, table, follow_links)
    table = _with_columns(table, dataset)
    fingerprint, features, label = dataset._fingerprint, dataset.features, table.label_column
    scalars = [name for name, feature in features.items() if _SCALARS.fullmatch(str(getattr(feature, "dtype", "")))]
    used = (table.image_column, table.caption_column, label, *table.reference_column, *scalars)
    selected = dict.fromkeys(name for name in used if name is not None)
    dataset = _undecoded(dataset.select_columns(list(selected)))
    names = None if label is None else getattr(features[label], "names", None)
    rows = _Rows(dataset=dataset, table=table, root=None if follow_links else root)
    return Preparation.generated(
        NAME,
        out,
        options,
        partial(sources_of, rows.source, rows.name),
        np.random.default_rng(0).permutation(len(dataset)).tolist(),  # as files of a folder, see `Preparation.of`
        plan={
            "in": source,
            "order": "random",
            "table": asdict(table),
            "follow_links": follow_links,
            "files": [fingerprint, len(dataset)],
        },
        about={"class_names": list(names)} if names else {},
        samples_per_shard=samples_per_shard,
        validation=validation,
        entry="row",
    )


def _open(source: str, table: Table, follow_links: bool) -> tuple["Dataset", Path]:
    """Return a split of a data set, and the folder whose files its rows may name."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "this needs the library datasets, which is not installed: pip install 'megatron-dit[huggingface]'"
        ) from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised, too
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    path = Path(source)
    if not follow_links:
        check_inside(path.rglob("*"), path)  # linked folders are not entered
    if path.is_dir() and ((path / "dataset_dict.json").is_file() or (path / "state.json").is_file()):
        saved = _loaded(source, lambda: datasets.load_from_disk(source))
        splits = saved if isinstance(saved, dict) else {str(saved.split or table.split): saved}
        dataset = splits[_split_of(source, table.split, splits)]
        if not follow_links:
            check_inside((Path(file["filename"]) for file in dataset.cache_files), path)
        return dataset, path
    if path.is_file():
        if path.suffix != ".parquet":
            raise ConfigError(
                f"{source} is not a .parquet file; --in names one, a folder of them, or a name on the hub"
            )
        words: dict[str, Any] = {"path": "parquet", "data_files": source}
    else:
        words = {"path": source, "name": table.config}
        if not path.is_dir():
            _check_hub(source)
    builder = _loaded(source, lambda: datasets.load_dataset_builder(**words))
    kind = type(builder).__module__.removeprefix("datasets.packaged_modules.").partition(".")[0]
    if kind not in KINDS:
        raise ConfigError(f"{source} is a data set of kind {kind}; only {', '.join(KINDS)} are read")
    _loaded(source, builder.download_and_prepare)
    split = _split_of(source, table.split, builder.info.splits or {})
    root = path if path.is_dir() else path.parent if path.is_file() else Path(datasets.config.HF_CACHE_HOME)
    return _loaded(source, lambda: builder.as_dataset(split)), root


def _check_hub(source: str) -> None:
    """Check that a name has the form of hub names, and that the hub can be reached if the data set is not cached."""
    import datasets
    from huggingface_hub import constants

    if not _HUB_NAME.fullmatch(source):
        raise ConfigError(f"{source} is not a folder, a file or a name on the Hub; give a path, or OWNER/NAME")
    cached = (
        Path(constants.HF_HUB_CACHE, f"datasets--{source.replace('/', '--')}"),
        Path(datasets.config.HF_DATASETS_CACHE, source.replace("/", "___")),
    )
    if not any(folder.is_dir() for folder in cached):
        check_reachable(source)


def _loaded(source: str, load: Any) -> Any:
    """Call a function of `datasets`; its errors become one line."""
    from datasets.exceptions import DatasetGenerationError

    try:
        return load()
    except DatasetGenerationError as error:
        why = error.__cause__ or error
        raise DataError(f"{source} cannot be read: {' '.join(str(why).split())}; copy or download it again") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{source} cannot be opened: {' '.join(str(error).split())}") from error


def _split_of(source: str, split: str, splits: Iterable[str]) -> str:
    names = list(splits)
    if split not in names:
        raise ConfigError(f"{source} has no split {split!r}, only {', '.join(names)}{_hint('--split', split, names)}")
    return split


def _hint(flag: str, name: str, names: Sequence[str]) -> str:
    return did_you_mean(name, names) or f"; name one of them with {flag}"


def _with_columns(table: Table, dataset: "Dataset") -> Table:
    """Return a table with the columns of a data set that it does not state."""
    features = dataset.features
    references = [("--reference-column", name) for name in table.reference_column]
    for flag, column in (
        ("--image-column", table.image_column),
        ("--caption-column", table.caption_column),
        ("--label-column", table.label_column),
        *references,
    ):
        if column is not None and column not in features:
            names = ", ".join(features)
            raise ConfigError(f"{flag} {column}: no such column among {names}{_hint(flag, column, list(features))}")
    pictures = [name for name, feature in features.items() if _holds_pictures(feature)]
    image = table.image_column or (_IMAGE if _IMAGE in pictures else None)
    if image is None and len(pictures) != 1:
        fault = f"several columns have pictures: {', '.join(pictures)}" if pictures else "no column has pictures"
        raise ConfigError(f"{fault}; name one of {', '.join(features)} with --image-column")
    image = image or pictures[0]
    for flag, column in (("--image-column", image), *references):
        if column not in pictures:
            kind = getattr(features[column], "dtype", type(features[column]).__name__)
            raise ConfigError(
                f"{flag} {column} has {kind}, not files of pictures; if these are URLs, "
                "download the pictures first (img2dataset) and prepare its output"
            )
    caption = table.caption_column or next((name for name in _CAPTIONS if name in features), None)
    is_number = "int" in str(getattr(features.get(_LABEL), "dtype", ""))
    label = table.label_column or (_LABEL if is_number else None)
    return replace(table, image_column=image, caption_column=caption, label_column=label)


def _holds_pictures(feature: Any) -> bool:
    from datasets import Image

    if isinstance(feature, dict):
        return {"bytes", "path"} == set(feature)
    return isinstance(feature, Image) or getattr(feature, "dtype", "") in ("binary", "large_binary")


def _undecoded(dataset: "Dataset") -> "Dataset":
    """Return the data set with files instead of decoded pictures."""
    from datasets import Image

    for name, feature in dataset.features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
    return dataset
