"""Tensors of a diffusers folder that are read on request, in slices, without a copy of the file in memory.

A file is mapped while one tensor of it is read. Its pages count as memory of the process only until then.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dit import safe_files
from dit.convert.rules import Shape
from dit.convert.state_files import CONFIG, INDEX, PICKLES, check_index, index_of, reading, shard_names, weights_file
from dit.errors import ConfigError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types by their names in safetensors files; quantised weights have others."""


class StoredTensors:
    """The tensors of a folder with `config.json` and safetensors files; the constructor reads only headers."""

    def __init__(self, folder: Path) -> None:
        weight_map = shard_names(folder) if index_of(folder).exists() else {}
        names = sorted(set(weight_map.values())) or [weights_file(folder).with_suffix(".safetensors").name]
        self.folder, self.files = folder, [folder / name for name in names]
        self.shapes: dict[str, Shape] = {}
        self.dtypes: set[str] = set()
        self._file_of: dict[str, Path] = {}
        if not weight_map:
            self._check_exists()
        for path in self.files:
            with reading(path), safe_files.open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118
                    entry = file.get_slice(name)
                    self.shapes[name], self._file_of[name] = tuple(entry.get_shape()), path
                    self.dtypes.add(entry.get_dtype())
        if weight_map:
            check_index(folder, weight_map, self.shapes)
        if quantised := sorted(self.dtypes - DTYPES.keys()):
            raise ConfigError(
                f"{folder} has weights of {', '.join(quantised)}; quantised weights are not read, only "
                f"{', '.join(DTYPES)}: download the weights in bf16"
            )

    def _check_exists(self) -> None:
        path = self.files[0]
        if not path.exists():
            pickles = sorted(entry.name for entry in self.folder.iterdir() if entry.suffix in PICKLES)
            fault = f"{CONFIG} but no {path.name} or {INDEX}"
            if pickles:
                fault = f"its weights as a pickle ({pickles[0]}), which cannot be read in slices and can run code"
            raise ConfigError(
                f"{self.folder} has {fault}; download the folder with .safetensors, or import a pickle: python -m "
                f"launch.import_weights --from {self.folder} --format diffusers --out RUN_DIR"
            )

    @contextmanager
    def slices(self, names: Sequence[str]) -> Iterator[list[Any]]:
        """Yield objects that return a part of a tensor when they are indexed, as views of the mapped file."""
        with ExitStack() as opened:
            entries = []
            for name in names:
                path = self._file_of[name]
                opened.enter_context(reading(path))
                entries.append(opened.enter_context(safe_files.open_safetensors(path)).get_slice(name))
            yield entries

    def read(self, name: str) -> Tensor:
        """Return a tensor in full."""
        with self.slices([name]) as (entry,):
            return entry[:].clone()
