"""The only module that calls `from_pretrained` of transformers and diffusers.

Weights must be safetensors. Code in a repository is never run, and the user is not asked whether to run it. A missing
weight is an error, because the libraries would replace it by random numbers.
"""

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Optional

from safetensors import SafetensorError

from dit.errors import ConfigError, first_few
from dit.hub import files_of
from dit.terminal import announce

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json")
_WEIGHTS = re.compile(r"(diffusion_pytorch_)?model(\.(?P<variant>\w+))?(-\d+-of-\d+)?\.safetensors")


def recorded_name(name: str) -> str:
    """Return the name of an encoder for records: the absolute path of a folder, or another name unchanged."""
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def load_without_code(kind: Any, what: str, **options: Any) -> Any:
    """Load a configuration, a tokenizer or a network."""
    try:
        return kind.from_pretrained(**options, trust_remote_code=False)
    except (OSError, ImportError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{what} cannot be loaded: {' '.join(str(error).split())}") from error


def load_tokenizer(what: str, **source: Any) -> Any:
    """Load a tokenizer; without a vocabulary, transformers would return one for which all words are unknown."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    tokenizer, folder = load_without_code(AutoTokenizer, what, **source), source.pop("pretrained_model_name_or_path")
    files = tokenizer.vocab_files_names.values()
    if not files:  # of bytes, as that of ByT5
        return tokenizer
    for file in dict.fromkeys([*_VOCABULARIES, *files]):
        with suppress(OSError):
            cached_file(folder, file, **source)
            return tokenizer
    where = "/".join(filter(None, (str(folder), source.get("subfolder"))))
    raise ConfigError(f"{what} cannot be loaded: {where} has no {_VOCABULARIES[0]}; copy or download it again")


def load_network(kind: Any, what: str, **options: Any) -> Any:
    """Load a network, frozen and in eval mode; see `load_without_code`."""
    source = options["pretrained_model_name_or_path"]
    announce(f"loading {what} from {'folder' if Path(source).is_dir() else 'the Hugging Face hub:'} {source}")
    options = {"variant": _variant_of(source, options.get("subfolder", "")), **options}
    library = logging.getLogger(kind.__module__.partition(".")[0])
    level = library.level
    library.setLevel(logging.ERROR)  # the library would list missing weights on many lines
    try:
        model, info = load_without_code(
            kind, what, **options, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    finally:
        library.setLevel(level)
    shapes = [f"{name} {list(stored)} instead of {list(needed)}" for name, stored, needed in info["mismatched_keys"]]
    faults = {"lack weights": sorted(info["missing_keys"]), "have weights of another shape": sorted(shapes)}
    for fault, names in faults.items():
        if names:
            raise ConfigError(
                f"the files of {what} {fault} ({len(names)}): {first_few(names, 3)}; copy or download them again"
            )
    return model.eval().requires_grad_(False)


def _variant_of(source: str, part: str) -> Optional[str]:
    """Return the variant of the weights, such as `fp16`, if a folder or a part of a repository has only one."""
    folder = Path(source)
    if folder.is_dir():
        files: Sequence[str] = [path.name for path in folder.iterdir()]
    else:
        files = files_of(source, lambda cached: None in _variants_in(cached, part))
    variants = _variants_in(files, part)
    return variants.pop() if len(variants) == 1 else None


def _variants_in(files: Sequence[str], part: str) -> set[Optional[str]]:
    """Return the variants of the weights in a folder; None stands for weights without a variant."""
    paths = [path for path in map(PurePosixPath, files) if path.parent == PurePosixPath(part)]
    return {match["variant"] for path in paths if (match := _WEIGHTS.fullmatch(path.name)) is not None}
