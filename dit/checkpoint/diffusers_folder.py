"""A network of diffusers on disk as the start of a run: settings and weights, without a converted copy.

    model_index.json                     of a pipeline, which has the network in transformer/ or unet/
    transformer/config.json              class and sizes
    transformer/diffusion_pytorch_model-00001-of-00003.safetensors, ..., and their index

Every rank reads the slices of the files that it owns, see `dit.convert.sliced_weights`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Optional

from dit.backends.process_groups import ProcessGroups, gather_objects
from dit.checkpoint.added_inputs import with_added_inputs
from dit.checkpoint.manifest import hash_file
from dit.checkpoint.state_files import Weights
from dit.checkpoint.verify_together import fails_together
from dit.convert.diffusers_format import DiffusersFormat, TrainedModel, format_of_settings
from dit.convert.diffusers_pipeline import pipeline_class, spacing_notes
from dit.convert.pipeline_import import PARTS, check_single, complete, network_folder
from dit.convert.rules import RuleBook
from dit.convert.run_record import CONFIG_KEY, from_record
from dit.convert.sliced_weights import SlicedWeights, StoredTensors
from dit.convert.state_files import CONFIG, STEM, VARIANT, VARIANT_INDEX, read_json
from dit.errors import ConfigError, first_few
from dit.hub import PREFIX, download
from dit.models.base import ModelConfig
from dit.models.conditioned import ControlConditioned
from dit.models.dit.config import DiTConfig
from dit.parallel.build import parameter_shapes
from dit.pipeline_folder import PIPELINE_INDEX, with_folders_of
from dit.safe_files import parse_json

WEIGHTS = (f"{STEM}.safetensors", f"{STEM}-*-of-*.safetensors", f"{STEM}.safetensors.index.json")
DOWNLOADED = (
    *(PIPELINE_INDEX, CONFIG, f"*/{CONFIG}", "scheduler/*.json", *WEIGHTS),
    *(f"{part}/{name}" for part in PARTS for name in WEIGHTS),
)
"""Files of a repository on the hub that a run starts from."""
VARIANTS = tuple(f"{part}{name}" for part in ("", *(f"{part}/" for part in PARTS)) for name in (VARIANT, VARIANT_INDEX))
"""Files that are also downloaded if the repository has no other weights."""
NOT_SIZES = ("lora", "class_dropout", "context_dropout", "null_text")
"""Settings that change neither shape nor order of the stored weights."""


@dataclass(frozen=True)
class Network:
    """The settings of a network in the diffusers layout.

    Attributes:
        trained: our model, with published defaults for values that are not in the files.
    """

    folder: Path
    form: DiffusersFormat[ModelConfig]
    trained: TrainedModel

    @property
    def model(self) -> ModelConfig:
        return self.trained.model

    @property
    def encoders(self) -> tuple[Optional[str], Optional[str]]:
        return self.trained.autoencoder, self.trained.text_encoder

    @property
    def base(self) -> None:
        """Adapters are not read from such a folder."""

    def digest(self, groups: Optional[ProcessGroups]) -> str:
        """Return a digest of settings and weights, whose files the ranks share, see `CheckpointStart.digest`."""
        with fails_together(groups):
            files = [self.folder / CONFIG, *StoredTensors(self.folder).files]
        with fails_together(groups):  # hashing takes long, so all files must exist first
            share = files if groups is None else files[groups.rank :: groups.world_size]
            local = {path.name: hash_file(path.resolve()).sha256 for path in share}
        parts = [local] if groups is None else gather_objects(local)
        digests = {name: digest for part in parts for name, digest in part.items()}
        return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()

    def weights(
        self, model: ModelConfig, shapes: Optional[Mapping[str, Sequence[int]]] = None, *, adapters: bool = False
    ) -> Weights:
        """Open the weights for a model of the same sizes; see `CheckpointStart.weights`."""
        stored = model
        if isinstance(model, ControlConditioned) and getattr(self.trained.model, "control_channels", None) is None:
            stored = replace(model, control_channels=None)
        if isinstance(stored, DiTConfig):
            stored = replace(stored, interval_conditioning=False)
        rules = _checked_rules(self, stored.without_adapters())
        return with_added_inputs(SlicedWeights(rules, StoredTensors(self.folder), self.trained.notes), model)

    def rules(self, model: ModelConfig) -> RuleBook:
        """Return the rules between the files and a model of the same sizes."""
        return self.form.rules(model, parameter_shapes(model), self.trained.latent_size)


def local_path(path: str | Path) -> Path:
    """Return the folder of a path or of an address `hf://owner/name`, which is downloaded."""
    if not (isinstance(path, str) and path.startswith(PREFIX)):
        return Path(path)
    with suppress(ConfigError):  # of weights without a variant, which the cache or the repository may lack
        if _is_complete(folder := download(path, DOWNLOADED, _is_complete)):
            return folder
    return download(path, (*DOWNLOADED, *VARIANTS), partial(_is_complete, variants=True))


def _is_complete(folder: Path, *, variants: bool = False) -> bool:
    """Return whether a folder has a network with all its weights, also of a variant if `variants` is set."""
    try:
        files = StoredTensors(network_folder(folder)).files if is_network(folder) else []
    except ConfigError:
        return False
    return bool(files) and (variants or not any(fnmatch(file.name, VARIANT) for file in files))


def is_network(path: Path) -> bool:
    """Return whether a folder has a network in the diffusers layout, or a pipeline with one."""
    return (network_folder(path) / CONFIG).is_file()


def read_network(source: Path) -> Network:
    """Read the settings of a network, or of the network in a pipeline's folder."""
    check_single(source)
    folder = network_folder(source)
    settings = read_json(folder / CONFIG)
    try:
        form = format_of_settings(settings)
        trained = form.read_settings(settings)
        if CONFIG_KEY in settings:
            trained = _exported(settings, form)
        completed = complete(trained, folder)
        if CONFIG_KEY not in settings:
            is_noted = not completed.recorded or len(completed.notes) > len(trained.notes)
            trained = completed
            added = [] if is_noted else spacing_notes(form, trained)
        else:
            if (line := completed.text_encoder) is not None:
                trained = replace(trained, text_encoder=with_folders_of(line, trained.text_encoder))
            pipeline, read, objective = pipeline_class(form, trained.model), completed.objective, trained.objective
            # A scheduler that spaces its steps itself has another shift.
            differs = pipeline is not None and pipeline.times != "none" and read != objective
            added = [f"the objective is {objective} of the record; that of scheduler/ is {read}"] * differs
        trained = replace(trained, autoencoder=completed.autoencoder, notes=[*completed.notes, *added])
        trained.model.validate()
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from error
    return Network(folder, form, trained)


def _exported(settings: Mapping[str, Any], form: DiffusersFormat[ModelConfig]) -> TrainedModel:
    """Return the model in the record of an export, which must agree with the other settings."""
    exported = from_record(settings[CONFIG_KEY], form.config_class)
    recorded_settings, _ = form.write_settings(exported.model, exported.latent_size)
    plain = parse_json(json.dumps({**form.defaults, **settings}))
    changed = [n for n in form.defaults if plain[n] != parse_json(json.dumps(recorded_settings[n]))]
    if changed:
        changes = ", ".join(f"{n}={plain[n]!r} (recorded: {recorded_settings[n]!r})" for n in changed)
        raise ConfigError(
            f"the file was changed after its export: {changes}; remove {CONFIG_KEY} from it, and give launch.train "
            "objective=NAME, or launch.import_weights --objective NAME"
        )
    return exported


def _checked_rules(network: Network, model: ModelConfig) -> RuleBook:
    """Return the rules for the model of a run, which must have the sizes of the network."""
    stored, path = network.trained.model, network.folder / CONFIG
    cure = f"--factory \"finetune(base='{network.folder}')\" takes model and objective from the folder"
    if type(model) is not type(stored):
        raise ConfigError(
            f"checkpoint.start_from: {path} is of {network.form.class_name}, our {type(stored).__name__}, but the "
            f"model of the run is {type(model).__name__}; {cure}"
        )
    rules = network.rules(model)
    if _sizes(rules, model) == _sizes(network.rules(stored), stored):
        return rules
    names = [field.name for field in fields(model) if field.name not in NOT_SIZES]
    changed = [name for name in names if getattr(model, name) != getattr(stored, name)]
    theirs, ours = (first_few([f"{n}={getattr(m, n)!r}" for n in changed]) for m in (stored, model))
    raise ConfigError(
        f"checkpoint.start_from: {path} has {theirs}, but the model of the run has {ours}; set these settings of model "
        f"to the former, or {cure}"
    )


def _sizes(rules: RuleBook, model: ModelConfig) -> object:
    """Return what must be equal: shapes and order of the weights, and heads, which not every rule depends on."""
    heads = [getattr(model, name, None) for name in ("num_attention_heads", "head_size")]
    return heads, [(rule, rules.shapes[rule.name]) for rule in rules.rules]
