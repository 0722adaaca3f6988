"""The only module that calls `from_pretrained` of transformers and diffusers.

Weights must be safetensors. Code in a repository is never run, and the user is not asked whether to run it. A missing
weight is an error, because the libraries would replace it by random numbers.
"""

import logging
import re
from pathlib import Path
from typing import Any, Optional

from dit.errors import ConfigError
from dit.terminal import announce

_NAMED = 3  # weights that a message names
_WEIGHTS = re.compile(r"(diffusion_pytorch_)?model(\.(?P<variant>\w+))?(-\d+-of-\d+)?\.safetensors")


def load_without_code(kind: Any, what: str, **options: Any) -> Any:
    """Load a configuration, a tokenizer or a network."""
    try:
        return kind.from_pretrained(**options, trust_remote_code=False)
    except (OSError, ImportError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{what} cannot be loaded: {' '.join(str(error).split())}") from error


def load_network(kind: Any, what: str, **options: Any) -> Any:
    """Load a network, frozen and in eval mode; see `load_without_code`."""
    source = options["pretrained_model_name_or_path"]
    options = {"variant": _variant_of(Path(source)), **options}
    announce(f"loading {what} from {'folder' if Path(source).is_dir() else 'the Hugging Face hub:'} {source}")
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
    for fault, names in (
        ("lack weights", sorted(info["missing_keys"])),
        ("have weights of another shape", sorted(shapes)),
    ):
        if names:
            raise ConfigError(
                f"the files of {what} {fault} ({len(names)}): {', '.join(names[:_NAMED])}"
                f"{', ...' if len(names) > _NAMED else ''}; copy or download them again"
            )
    return model.eval().requires_grad_(False)


def _variant_of(folder: Path) -> Optional[str]:
    """Return the variant of the weights, such as `fp16`, if a folder has only one."""
    matches = [_WEIGHTS.fullmatch(path.name) for path in folder.glob("*.safetensors")]
    variants = {match["variant"] for match in matches if match is not None}
    return variants.pop() if len(variants) == 1 else None
