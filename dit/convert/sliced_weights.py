"""Read boxes of parameters from slices of external tensors, by the rules of a conversion.

Most forms permute one axis. They are applied to the indices of that axis, which gives the position in the parameter of
each index of each external tensor. A box then needs these slices (q, k and v of two heads, three features each; TP 2):

    parameter, rows       q0 q0 q0 k0 k0 k0 v0 v0 v0 | q1 q1 q1 k1 k1 k1 v1 v1 v1
    rank 0 reads          to_q[0:3], to_k[0:3], to_v[0:3]
    rank 1 reads                                       to_q[3:6], to_k[3:6], to_v[3:6]

If a form changes several axes (`Form.axis` is None, as for the convolution that embeds patches), its tensors are read
in full, rearranged and dropped: they are small.

A file is mapped while one tensor of it is read: a slice is a view of the file, of which only the selected indices are
copied. Its pages count as memory of the process only until then.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from einops import EinopsError
from torch import Tensor

from dit import safe_files
from dit.boxes import Box
from dit.convert.rules import Copies, Rule, RuleBook, Shape, check_numbers, check_shapes, check_table
from dit.convert.state_files import CONFIG, INDEX, PICKLES, check_index, index_of, reading, shard_names, weights_file
from dit.errors import CheckpointError, ConfigError

PIECE_ELEMENTS = 1 << 20  # copied at once
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types by their names in safetensors files; quantised weights have others."""

Block = tuple[slice, ...]


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
        with self.slices([name]) as (entry,):
            return entry[:].clone()

    def read_all(self) -> dict[str, Tensor]:
        return {name: self.read(name) for name in self.shapes}


class SlicedWeights:
    """The parameters of a model in the files of a diffusers folder, read like those of a checkpoint.

    Attributes:
        notes: sentences about the folder and about parameters that it lacks.
    """

    def __init__(self, rules: RuleBook, stored: StoredTensors, notes: Sequence[str] = ()) -> None:
        self.shapes = rules.shapes
        self.notes = [*notes, *(f"{name} starts as zeros: {why}" for name, why in rules.unmatched.items())]
        self._stored, self._unmatched = stored, rules.unmatched
        self._rules = {rule.name: rule for rule in rules.rules}
        shapes = {name: shape for name, shape in stored.shapes.items() if name not in rules.tables}
        check_shapes(f"the weights in {stored.folder} do not fit its config.json", rules.external_shapes(), shapes)
        for name, table in rules.tables.items():
            if name in stored.shapes:
                check_table(name, stored.read(name), table)

    @torch.no_grad()
    def read(self, name: str, shape: Sequence[int], views: Iterable[tuple[Box, Tensor]]) -> None:
        """Copy boxes of a parameter into memory, on any device and in any precision; reads nothing else."""
        blocks = [(box.slices_in(Box.of(shape)), target) for box, target in views]
        if name in self._unmatched:
            for _, target in blocks:
                target.zero_()
            return
        rule = self._rules[name]
        try:
            with self._stored.slices(rule.external_names) as sources:
                if rule.form.axis is None:
                    tensors = [source[:] for source in sources]
                    _check(rule, tensors)
                    parameter = rule.form.from_external(tensors)
                    for block, target in blocks:
                        target.copy_(parameter[block])
                    return
                positions = rule.form.positions(shape[rule.form.axis])
                # Copies of one tensor are compared, so they are read together.
                together = [[source] for source in sources]
                if isinstance(rule.form, Copies):
                    together, positions = [sources], positions[:1]
                for block, target in blocks:
                    for piece, part in _pieces(block, target):
                        for some, places in zip(together, positions, strict=True):
                            _copy(rule, piece, part, some, places)
        except (ConfigError, EinopsError) as error:
            raise CheckpointError(f"{name} cannot be read from {self._stored.folder}: {error}") from error

    def __str__(self) -> str:
        count, files = sum(math.prod(self.shapes[name]) for name in self._rules), self._stored.files
        kinds = ", ".join(sorted(self._stored.dtypes)).lower()
        return f"{count:,} parameters of {self._stored.folder} ({len(files)} safetensors of {kinds})"


def _copy(rule: Rule, block: Block, target: Tensor, copies: Sequence[Any], positions: Tensor) -> None:
    """Copy the part of a block that an external tensor (the first of equal `copies`) has, by its `positions`."""
    axis = rule.form.axis
    assert axis is not None
    wanted = block[axis]
    indices = ((positions >= wanted.start) & (positions < wanted.stop)).nonzero().flatten()
    if not len(indices):
        return
    first, stop = int(indices[0]), int(indices[-1]) + 1
    index = (*block[:axis], slice(first, stop), *block[axis + 1 :])
    tensors = [source[index] for source in copies]
    if len(indices) < stop - first:
        tensors = [tensor.index_select(axis, indices - first) for tensor in tensors]
    _check(rule, tensors)
    values = tensors[0] if len(tensors) == 1 else rule.form.from_external(tensors)
    values = values.flatten(target.dim() - 1)  # without the axes of a 1 x 1 convolution
    target.index_copy_(axis, (positions[indices] - wanted.start).to(target.device), values.to(target))


def _pieces(block: Block, target: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """Split a block along the first axis into pieces of at most `PIECE_ELEMENTS`, if a row is not longer."""
    rows = max(1, PIECE_ELEMENTS // max(1, target[0].numel()))
    first, *others = block
    for part, start in zip(target.split(rows), range(first.start, first.stop, rows)):
        yield (slice(start, start + len(part)), *others), part


def _check(rule: Rule, tensors: Sequence[Tensor]) -> None:
    for name, tensor in zip(rule.external_names, tensors):
        check_numbers(name, tensor)
