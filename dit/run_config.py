"""The settings of one run: ten typed parts, checked together before anything is built."""

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Optional, Self, get_type_hints

from dit.condition_table import LABEL, match_conditions
from dit.config_record import CLASS_KEY, from_record, to_record
from dit.data_api import BatchSpec, DataConfig, NoData
from dit.errors import CheckpointError, ConfigError
from dit.fixed_packs import PackMaxima
from dit.models.base import ModelConfig
from dit.models.conditioned import ClassConditioned, TextConditioned
from dit.models.stdit.config import STDiTConfig
from dit.objective_checks import check_alignment, check_intervals, check_outputs
from dit.objectives.base import Objective
from dit.objectives.edm import VarianceExplodingPath
from dit.optimizer.schedules import Constant, Schedule
from dit.parallel.dims import ParallelConfig, ParallelDims, check_parallel, fewest_ranks
from dit.ranges import check_unused
from dit.settings import CheckpointConfig, LoggingConfig, OptimizerConfig, SamplingConfig, TrainingConfig

TRAINING_FUNCTION = "dit.training.pretrain.pretrain"
"""The function that a record starts: the `config.yaml` of a run folder starts the same run with `--yaml`."""


@dataclass(kw_only=True)
class RunConfig:
    """The settings of a run, by the names of `pretrain`'s arguments.

    Attributes:
        model: sizes of the backbone.
        data: source of the samples.
        objective: noise, target and loss.
        optimizer, schedule: update of the weights.
        parallel: distribution of model and data over ranks.
        training: length, batch sizes, precision, seed, intervals.
        checkpoint, logging: files on disk.
        sampling: pictures during training, and the defaults of the sample command.
    """

    model: ModelConfig
    data: DataConfig
    objective: Objective
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: Schedule = field(default_factory=Constant)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild a run from the plain values of `to_record`.

        A missing part gets its defaults; imported weights have no data.
        """
        parts = {name: from_record(record[name]) for name in PARTS if record.get(name) is not None}
        kinds = get_type_hints(cls)
        for name, part in parts.items():
            if not isinstance(part, kinds[name]):
                raise CheckpointError(
                    f"the record's {name} is {reprlib.repr(part)}, not settings of {kinds[name].__name__}; "
                    "restore the file"
                )
        return cls(**{"data": NoData(), **parts})

    def to_record(self) -> dict[str, Any]:
        """Return the settings as plain values, in the form of `config.yaml`."""
        return {**to_record(self), CLASS_KEY: TRAINING_FUNCTION}

    def parts(self) -> dict[str, Any]:
        """Return the ten parts by name."""
        return {name: getattr(self, name) for name in PARTS}

    def check(self, world_size: Optional[int] = None) -> tuple[ParallelDims, BatchSpec]:
        """Check every setting, then their combinations, without access to device and data.

        Training, the dry run and the benchmarks run these checks.

        Args:
            world_size: ranks of the run; None for the fewest that the layout needs.
        """
        self.model.validate()
        for part in (self.optimizer, self.parallel, self.training, self.checkpoint, self.logging, self.sampling):
            part.validate()
        if self.training.on_bad_numbers == "rewind" and not self.checkpoint.interval:
            raise ConfigError(
                "training.on_bad_numbers='rewind' returns to the last checkpoint, but checkpoint.interval=0 saves none "
                "before the end; set checkpoint.interval, or training.on_bad_numbers=skip"
            )
        if self.optimizer.algorithm == "muon" and not self.model.supports.tensor:
            raise ConfigError(
                f"optimizer.algorithm=muon updates the linear layers of transformer blocks, and model="
                f"{type(self.model).__name__} consists of convolutions, which it does not update; use "
                "optimizer.algorithm=adamw"
            )
        self.schedule.check(self.optimizer.lr)
        check_outputs(self.objective, self.model)
        check_alignment(self.objective, self.model)
        check_intervals(self.objective, self.model, self.parallel, self.training, self.sampling)
        self._check_unused()
        if self.model.adapters is not None and self.checkpoint.start_from is None:
            raise ConfigError(
                "model.lora trains adapters of a trained model, but checkpoint.start_from is not set; set "
                "checkpoint.start_from=RUN_DIR (launch.import_weights writes one), or model.lora=none"
            )
        source = self.checkpoint.resume_from
        if source is not None and self.checkpoint.start_from is not None and self.model.adapters is None:
            raise ConfigError(
                f"checkpoint.resume_from={source} continues a run, but checkpoint.start_from starts a new one; remove "
                "one of the two"
            )
        if not self.objective.reconstructs:
            check_sampling(self.sampling, self.objective, self.model)
        elif self.training.sample_interval:
            raise ConfigError(
                f"training.sample_interval={self.training.sample_interval}: an autoencoder draws no samples; use 0"
            )
        low, high = self.objective.trained_times
        if self.training.sample_interval and (low, high) != (0, 1):
            raise ConfigError(
                f"training.sample_interval={self.training.sample_interval} draws samples at all times, and the model "
                f"trains on times from {low} to {high} (objective.min_time, max_time); use "
                "training.sample_interval=0, and launch.sample with the pair of models"
            )
        dims = check_parallel(self.model, self.parallel, self.training, world_size or fewest_ranks(self.parallel))
        spec = self.model.batch_spec(micro_batch_size=dims.micro_batch_size, multiple_of=dims.token_multiple)
        spec = spec.with_conditions(self.objective.conditions)
        self.data.check_settings(spec, dims.data_parallel_size, dims.micro_batches * dims.data_parallel_size)
        is_packed = getattr(self.data, "max_tokens_per_pack", None) is not None
        if self.objective.compares_pairs and dims.micro_batch_size % 2 and not is_packed:
            raise ConfigError(
                f"{type(self.objective).__name__} compares pairs of samples, and a micro-batch has "
                f"{dims.micro_batch_size}; "
                "set an even training.micro_batch_size that divides the samples of a replica, or pack samples "
                "(data.max_tokens_per_pack)"
            )
        if self.data.mixes_shapes(spec):
            cure = "data of one shape, or data.bucket_by_shape=True without data.max_tokens_per_pack"
            self.model.check_supports("mixed_shapes", f"data={type(self.data).__name__}", cure)
        if self.training.cuda_graph:
            check_cuda_graph(self, spec)
        if (setting := self.data.levels_setting()) is not None:
            check_levels(self.model, self.objective, setting, "data without it")
        if (setting := self.data.references_setting()) is not None:
            check_references(self.model, self.objective, setting, "data without it")
        return dims, spec

    @property
    def loss_changes(self) -> tuple[Optional[int], ...]:
        """Completed steps after which terms of the loss or weights of a blend change; None for never."""
        return *self.objective.auxiliary.changes, *(getattr(self.data, "blend_steps", None) or ())

    def fixed_packs(self, spec: BatchSpec) -> Optional[PackMaxima]:
        """Return the sizes to which packs are padded for a CUDA graph; None for dense batches, or without a graph."""
        return self.data.pack_maxima() if self.training.cuda_graph and self.data.mixes_shapes(spec) else None

    def _check_unused(self) -> None:
        """Raise an error for settings that have no effect because of settings of other parts."""
        model, training, stop = self.model, self.training, self.training.stop_at_step
        if not (training.sample_interval and training.ema_decay is not None):
            both = "training.sample_interval and training.ema_decay"
            check_unused("sampling", self.sampling, ["raw_weights"], f"without both {both}", f"set {both}")
        if training.validation_interval == 0:
            where, cure = "with training.validation_interval=0", "set training.validation_interval"
            check_unused("checkpoint", self.checkpoint, ["keep_best"], where, cure)
        if stop is not None and stop > training.num_steps:
            where = f"with training.num_steps={training.num_steps}"
            check_unused("training", training, ["stop_at_step"], where, "set a step up to that")
        if isinstance(model, ClassConditioned) and model.num_classes is None and model.class_dropout > 0:
            check_unused("model", model, ["class_dropout"], "without model.num_classes", "set model.num_classes")
        if isinstance(model, TextConditioned) and model.context_size is None and model.context_dropout > 0:
            check_unused("model", model, ["context_dropout"], "without model.context_size", "set model.context_size")
        if self.sampling.guidance_scale != 1 and all(condition.dropout is None for condition in model.conditions()):
            cure = "set sampling.guidance_scale=1, or model.num_classes or model.context_size"
            where = "for a model without classes and texts"
            check_unused("sampling", self.sampling, ["guidance_scale"], where, cure)

    def check_here(self) -> tuple[ParallelDims, BatchSpec]:
        """Check the settings, also against the started ranks, the installed libraries, and the data."""
        # Importing Megatron-Core takes seconds; a dry run does not need it.
        from dit.backends.process_groups import world_size_from_environment
        from dit.parallel.implementations import implementations

        dims, spec = self.check(world_size_from_environment())
        implementations(self.model, self.training)
        self.data.validate(spec, dims.data_parallel_size, dims.micro_batches * dims.data_parallel_size)
        intervals = [self.training.validation_interval, self.training.sample_interval if self.draws_held_out else 0]
        if any(0 < interval <= self.training.num_steps for interval in intervals):
            self.data.validate_held_out()
        self.unused_conditions()
        return dims, spec

    @property
    def draws_held_out(self) -> bool:
        """True if the model reads pictures, such as those to edit. Samples then need held-out pictures."""
        pictures = (condition.axis == "latent" or condition.of_picture for condition in self.model.conditions())
        return self.training.validation_interval > 0 and (any(pictures) or self.data.references_setting() is not None)

    def unused_conditions(self) -> list[str]:
        """Return a line for each condition of the data that the model does not use; reads the first samples."""
        wanted = (*self.model.conditions(), *self.objective.conditions)
        return match_conditions(wanted, self.data.stored_conditions())

    def remarks(self, dims: ParallelDims, spec: BatchSpec) -> list[str]:
        """Return lines about surprising properties of the run; reads some samples."""
        return [*self.adaptations(dims), *self.unused_conditions(), *self.data.remarks(spec)]

    def adaptations(self, dims: ParallelDims) -> list[str]:
        """Return a line for each setting that is adapted, never reached, or uses an untrained prediction."""
        training, lines = self.training, list[str]()
        if dims.micro_batch_size < training.micro_batch_size:
            lines.append(
                f"micro-batches of {dims.micro_batch_size}, not training.micro_batch_size={training.micro_batch_size}: "
                f"a global batch of {training.global_batch_size} is split over {dims.data_parallel_size} replicas in "
                f"{dims.micro_batches} micro-batch{'es' if dims.micro_batches > 1 else ''} each"
            )
        unreached = {
            "training.validation_interval": (training.validation_interval, "no held-out loss is measured"),
            "training.sample_interval": (training.sample_interval, "no samples are drawn"),
            "training.recheck_interval": (training.recheck_interval, "no step is computed twice"),
            "logging.profile_steps": (self.logging.profile_steps, "not all of them are traced"),
        }
        for name, (value, consequence) in unreached.items():
            if (max(value) if isinstance(value, list) else value or 0) > training.num_steps:
                lines.append(f"{name}={value} is above training.num_steps={training.num_steps}, so {consequence}")
        start_step = self.objective.auxiliary.start_step
        if start_step >= training.num_steps:
            lines.append(
                f"objective.adversarial.start_step={start_step} is not below training.num_steps={training.num_steps}, "
                "so its terms never count"
            )
        lines += filter(None, [self.untrained_guidance(self.sampling.guidance_scale, "sampling.guidance_scale=")])
        return lines + self.schedule.adapted(training.num_steps)

    def untrained_guidance(self, scale: float, setting: str) -> Optional[str]:
        """Return a note if guidance uses the prediction without conditions and no step seems to have trained it.

        Args:
            setting: setting or option of the scale, up to its value.
        """
        # Weights to start from may have been trained with dropout.
        never_dropped = [c.name for c in self.model.conditions() if c.dropout == 0 and not c.may_be_empty]
        if not never_dropped or scale == 1 or self.checkpoint.start_from is not None:
            return None
        name = "class_dropout" if LABEL.name in never_dropped else "context_dropout"
        return (
            f"{setting}{scale:g} uses the prediction without conditions, which model.{name}=0 never trains; train with "
            f"model.{name}=0.1, or use {setting}1"
        )


def check_cuda_graph(config: RunConfig, spec: BatchSpec) -> None:
    """Check that CUDA graphs can repeat the passes of a step (`dit.step.cuda_graph`) and its update."""
    fault = next(_faults_of_graphs(config, spec), None)
    if fault is not None:
        raise ConfigError(f"training.cuda_graph=True does not work with {fault}, or training.cuda_graph=False")


def _faults_of_graphs(config: RunConfig, spec: BatchSpec) -> Iterator[str]:
    """Yield the settings with which no CUDA graph can repeat steps, with reason and cure."""
    parallel, training, beta1 = config.parallel, config.training, config.optimizer.beta1
    if getattr(config.model, "routing", None) is not None:
        yield "model.routing, because it computes tables of the kept tokens from lengths; use model.routing=none"
    if (maxima := config.fixed_packs(spec)) is not None:
        cure = "data without data.max_tokens_per_pack, of one shape or with data.bucket_by_shape=True"
        yield from (f"packs and {fault}, or {cure}" for fault in _faults_of_packs(config, spec, maxima))
    elif config.data.mixes_shapes(spec):
        yield (
            f"data={type(config.data).__name__}, because batches have other lengths in every step; set "
            "data.max_tokens_per_pack, or use data of one shape, or data.bucket_by_shape=True"
        )
    if (experts := config.model.megatron_sizes().num_moe_experts) is not None:
        cure = "use a model without experts"
        yield f"num_moe_experts={experts}, because the number of tokens of an expert depends on values; {cure}"
    if (stages := parallel.pipeline_model_parallel_size) > 1:
        yield (
            f"parallel.pipeline_model_parallel_size={stages}, because stages exchange the shapes of "
            "activations; use parallel.pipeline_model_parallel_size=1"
        )
    if parallel.data_parallel == "fsdp":
        yield (
            "parallel.data_parallel=fsdp, because sharded weights have other addresses in every step; use "
            "parallel.data_parallel=distributed_optimizer"
        )
    if parallel.overlap_grad_reduce:
        yield (
            "parallel.overlap_grad_reduce=True, because gradients are reduced after the graph; use "
            "parallel.overlap_grad_reduce=False and parallel.overlap_param_gather=False"
        )
    if config.optimizer.offload:
        yield "optimizer.offload=True, because the host waits for the moments; use optimizer.offload=False"
    if config.schedule.momentum(1, 2, beta1) != beta1 and training.kernels != "triton":
        schedule, cure = type(config.schedule).__name__, "use training.kernels=triton"
        yield f"schedule={schedule}, because it changes beta1, which is a number on the host; {cure}"
    if training.linears == "transformer_engine":
        reason = "its modules count micro-batches on the host"
        yield f"training.linears=transformer_engine, because {reason}; use training.linears=megatron"
    if training.linears == "overlapped":
        reason = "its memory for messages grows with the largest micro-batch"
        yield f"training.linears=overlapped, because {reason}; use training.linears=megatron"


def _faults_of_packs(config: RunConfig, spec: BatchSpec, maxima: PackMaxima) -> Iterator[str]:
    """Yield the settings with which no CUDA graph can repeat packs, with reason and cure."""
    training, parallel, model = config.training, config.parallel, config.model
    cure = "data without data.max_tokens_per_pack, of one shape or with data.bucket_by_shape=True, or "
    model.check_supports("fixed_packs", "training.cuda_graph=True with packs", f"{cure}training.cuda_graph=False")
    has_segments = isinstance(model, STDiTConfig) and model.has_segments
    comms = parallel.context_comm, parallel.spatial_temporal_comm
    if parallel.context_parallel_size > 1 and has_segments and comms != ("a2a", "context"):
        yield (
            f"parallel.context_comm={comms[0]} and parallel.spatial_temporal_comm={comms[1]}, because packs "
            "of fixed size need a mask, which only an exchange of heads supports; use parallel.context_comm=a2a and "
            "parallel.spatial_temporal_comm=context"
        )
    if (levels := config.data.levels_setting() or config.data.references_setting()) is not None:
        yield f"{levels}, because the number of levels differs from pack to pack; use data without it"
    if maxima.text_tokens is None and any(condition.axis == "text" for condition in spec.conditions):
        yield "data.max_text_tokens=null, because texts have no maximal length; set data.max_text_tokens"
    if training.attention == "transformer_engine":
        reason = "it compares lengths on the host"
        yield f"training.attention=transformer_engine, because {reason}; use training.attention=auto"
    if training.kernels == "compile":
        yield "training.kernels=compile, because compiled layers check lengths on the host; use training.kernels=auto"


def check_levels(model: ModelConfig, objective: Objective, setting: str, cure: str) -> None:
    """Check that model and objective support several noise levels in a sample.

    Args:
        setting: setting that requires them, with its value.
        cure: what to use otherwise.
    """
    model.check_supports("levels", setting, cure)
    _check_clean_tokens(objective, setting, cure)


def check_references(model: ModelConfig, objective: Objective, setting: str, cure: str) -> None:
    """Check that model and objective support clean tokens outside the grid of a sample; arguments as `check_levels`."""
    if not model.takes_references:
        raise ConfigError(
            f"a reference has tokens outside the grid of its sample, which {type(model).__name__} with these settings "
            "does not support (spatial and temporal attention and learned_3d positions need the grid); use "
            "model.layer_pattern=['full'] or model.position_embedding=rope_3d where the model has them, another model "
            f"such as wan, or {cure}"
        )
    _check_clean_tokens(objective, setting, cure)


def _check_clean_tokens(objective: Objective, setting: str, cure: str) -> None:
    if not objective.takes_levels:
        raise ConfigError(
            f"{setting} needs several noise levels in a sample, and the objective has one: {objective}; use "
            f"objective=flow_matching, edm or ddpm, or {cure}"
        )


def check_sampling(sampling: SamplingConfig, objective: Objective, model: ModelConfig) -> None:
    """Check that the sampling settings fit the model and the objective."""
    vae = sampling.vae
    if vae is not None and vae.startswith(("/", "./", "../", "~")) and not Path(vae).expanduser().is_dir():
        raise ConfigError(f"sampling.vae={vae!r} is not a folder; name an autoencoder in diffusers' layout")
    # Raises if a table of noise levels has fewer levels than `num_steps`.
    objective.at_size(1, model.token_channels).sampling_grid(sampling.num_steps)
    if sampling.variance != "small" and sampling.solver != "ancestral":
        raise ConfigError(
            f"sampling.variance={sampling.variance!r} has no effect with sampling.solver={sampling.solver!r}; use "
            "sampling.solver=ancestral, or sampling.variance=small"
        )
    if sampling.variance == "learned" and objective.num_outputs == 1:
        raise ConfigError(
            f"sampling.variance='learned' needs an objective with a learned variance, but it is {objective}; "
            "use sampling.variance=small or large, or objective=ddpm_learned_variance"
        )
    if sampling.churn is not None and not isinstance(objective.path, VarianceExplodingPath):
        raise ConfigError(
            f"sampling.churn={sampling.churn} raises the noise level sigma of EDM's path, but the objective is "
            f"{objective}; use objective=edm, or sampling.churn=none"
        )
    if sampling.thresholding != "none":
        objective.check_thresholding(sampling.solver, sampling.num_steps)
    if (guided := sampling.guidance_channels) is not None and guided > model.in_channels:
        raise ConfigError(
            f"sampling.guidance_channels={guided} exceeds model.in_channels={model.in_channels}; "
            f"use at most {model.in_channels}, or none for all"
        )


PARTS = tuple(part.name for part in fields(RunConfig))
"""The names of the parts, in the order of `pretrain`'s arguments."""
