"""THE loop: read it from top to bottom to know what a run does."""

import logging as log
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
import yaml

from dit.backends import process_groups
from dit.backends.device import local_device
from dit.backends.process_groups import ProcessGroups, world_size_from_environment
from dit.backends.provider import resolve_linears
from dit.batch import PackedBatch
from dit.checkpoint.checkpointer import CONFIG_FILE, Checkpointer, TrainState, held_out_meta
from dit.checkpoint.manifest import HeldOut
from dit.checkpoint.store import CheckpointStore
from dit.checkpoint.warm_start import start_from
from dit.config_record import CLASS_KEY, to_record
from dit.context_parallel.shard_batch import over_whole_packs, shard
from dit.data_api import BatchSpec, DataConfig
from dit.durable_files import write_record
from dit.errors import EXIT_PREEMPTED
from dit.inference.preview import PictureWriter, check_pictures
from dit.kernels.attention import resolve_attention
from dit.models.base import ModelConfig
from dit.monitoring.environment_record import ENV_FILE, append_attempt, environment_record
from dit.monitoring.exit_record import ExitRecord
from dit.monitoring.expert_load import expert_load
from dit.monitoring.flops import training_flops
from dit.monitoring.guards import PreemptionFlag, StackWatchdog, check_finite
from dit.monitoring.headline import headline
from dit.monitoring.profile import StepProfile
from dit.monitoring.progress import ConsoleProgress
from dit.monitoring.run_lock import RunLock
from dit.monitoring.sinks import METRICS_FILE, FanOut, JsonlSink, Sink, TensorBoardSink, WandbSink
from dit.monitoring.summary import drawing_command, how_it_went
from dit.objectives.base import Objective
from dit.optimizer.ema import EMA
from dit.optimizer.master_weights import apply_update, gradient_norm, master_shards, set_learning_rate
from dit.optimizer.schedules import learning_rate
from dit.parallel.build import DTYPES, build_model, build_optimizer, wrap
from dit.parallel.dims import ParallelConfig, ParallelDims
from dit.parallel.schedule import WholeNetwork, forward_backward
from dit.ranges import check_path
from dit.settings import (
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    SamplingConfig,
    ScheduleConfig,
    TrainingConfig,
)
from dit.training.checks import adapted, check_run
from dit.training.device_batches import DeviceBatches
from dit.training.step import find_suspects, training_forward_step
from dit.training.validate import held_out_loss

logger = log.getLogger(__name__)

STACK_DUMP_AFTER_S = 300.0


def pretrain(
    model: ModelConfig,
    data: DataConfig,
    objective: Objective,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    parallel: ParallelConfig,
    training: TrainingConfig,
    checkpoint: CheckpointConfig,
    logging: LoggingConfig,
    sampling: SamplingConfig,
) -> None:
    """Train a backbone, or continue a run that was stopped: the same call resumes.

    Every rank calls this. It locks the run folder and leaves `exit.json` there, whatever happens.

    Raises:
        ConfigError: settings do not fit together, or not with the checkpoint to resume, and no record was overwritten;
            or another process is writing to the run folder, and nothing was written.
        DataError: data are missing, unreadable or lost beyond the budget.
        NotFiniteError: the loss or the gradient norm is not finite; the weights are those before the step.
        CheckpointError: no valid checkpoint where one is required, or the disk is full.
        SystemExit: with code 75 when stopped early, after a checkpoint or before the first step.
    """
    settings = dict(locals())
    rank = int(os.environ.get("RANK", "0"))
    check_path("training.run_dir", training.run_dir)  # or there is no place for the lock and the record
    with (
        PreemptionFlag() as preemption,
        RunLock(training.run_dir, rank) as lock,
        ExitRecord(training.run_dir, rank, lock.is_ours) as record,
    ):
        with preemption.leaves_at_once():
            process_groups.connect()
            lock.agree()
            others = (checkpoint, logging, sampling)
            dims, spec = check_settings(model, data, optimizer, schedule, parallel, training, *others)
            check_pictures(sampling, objective)
            for line in adapted(schedule, training, dims) if rank == 0 else ():
                logger.info(line)
        with StackWatchdog(Path(training.run_dir) / "stacks" / f"rank_{rank}.txt", STACK_DUMP_AFTER_S) as watchdog:
            with preemption.leaves_at_once():
                groups = process_groups.initialize(parallel)
                run = Run(settings, dims, spec, groups)
                record.step = run.state.step
                preemption.waits_from_here()
                dist.barrier()  # from here on all ranks stop together
            try:
                record.preempted = run.train(record, preemption, watchdog.beat)
                run.summarize()
            finally:
                run.close()
            process_groups.destroy()
    if record.preempted:
        sys.exit(EXIT_PREEMPTED)


def check_settings(
    model: ModelConfig,
    data: DataConfig,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    parallel: ParallelConfig,
    training: TrainingConfig,
    *others: CheckpointConfig | LoggingConfig | SamplingConfig,
) -> tuple[ParallelDims, BatchSpec]:
    """Check all settings against each other, this machine and the data before anything is built or written.

    Raises:
        ConfigError, DataError: with the numbers and the cure.
    """
    world_size = world_size_from_environment()
    dims, spec = check_run(model, data, optimizer, schedule, parallel, training, *others, world_size=world_size)
    resolve_attention(local_device(), DTYPES[training.precision], training.attention)
    resolve_linears(training.linears)
    data.validate(spec, dims.data_parallel_size, dims.micro_batches * dims.data_parallel_size)
    return dims, spec


class Run:
    """One process's part of a run: what is built once, and the loop over it.

    Args:
        settings: the arguments of `pretrain`.
        quiet: log nowhere (benchmarks).
    """

    def __init__(
        self,
        settings: dict[str, Any],
        dims: ParallelDims,
        spec: BatchSpec,
        groups: ProcessGroups,
        *,
        quiet: bool = False,
    ) -> None:
        self.settings, self.dims, self.spec, self.groups = settings, dims, spec, groups
        self.began = time.monotonic()
        self.model: ModelConfig = settings["model"]
        self.objective: Objective = settings["objective"]
        self.training: TrainingConfig = settings["training"]
        self.data: DataConfig = settings["data"]
        self.device = local_device()
        run_dir = Path(self.training.run_dir)
        # What a model does not take, the members of a blend need not agree on.
        self.class_names = None if self.model.num_classes is None else self.data.class_names()
        self.record = {CLASS_KEY: f"{pretrain.__module__}.{pretrain.__name__}", **to_record(settings)}
        self.state = self._build()
        self.network = WholeNetwork(self.state.wrapped, groups)
        store = CheckpointStore(run_dir / "checkpoints", settings["checkpoint"])
        self.checkpointer = Checkpointer(store, settings, self.record)
        resumed = self.checkpointer.resume(self.state, settings["checkpoint"].resume)
        if not resumed and settings["checkpoint"].start_from is not None:
            start_from(settings["checkpoint"].start_from, self.state)
        self.batches = DeviceBatches(
            self.state.stream,
            self.device,
            self.model.num_classes,
            lambda batch: training_flops(self.model, batch.layout, batch.context_layout, grids=batch.grids),
            self._share,
        )
        if resumed:
            self.batches.recall_largest(self.checkpointer.resumed_facts, spec)
        self.text_encoder = None if self.model.context_size is None else self.data.text_encoder()
        self.pictures = PictureWriter(
            self.model, self.objective, spec, settings["sampling"], self.class_names, self.text_encoder
        )
        self.sinks: Optional[Sink] = None
        self.progress: Optional[ConsoleProgress] = None
        if groups.rank == 0 and not quiet:
            self._open_logs(run_dir, resumed)

    def _build(self) -> TrainState:
        parallel, training, groups = self.settings["parallel"], self.training, self.groups
        chunks = build_model(
            self.model,
            parallel,
            training.precision,
            groups,
            training.seed,
            attention=training.attention,
            linears=training.linears,
            recompute=training.recompute,
            recompute_layers=training.recompute_layers,
        )
        wrapped = wrap(chunks, parallel, groups)
        optimizer = build_optimizer(wrapped, self.settings["optimizer"], parallel, training.precision, groups)
        shards = master_shards(optimizer, chunks)
        ema = None if training.ema_decay is None else EMA(shards, training.ema_decay, training.ema_start_step)
        stream = self.data.build_train(
            self.spec,
            dp_rank=groups.dp_rank,
            dp_size=groups.dp_size,
            seed=training.seed,
            log_dir=training.run_dir if groups.is_data_reader else None,
        )
        return TrainState(wrapped, chunks, optimizer, shards, ema, stream, groups)

    def _share(self, batch: PackedBatch) -> PackedBatch:
        """Cut a whole pack for this context-parallel rank."""
        return shard(batch, self.groups.cp.rank(), self.groups.cp.size(), self.settings["parallel"].context_split)

    def _open_logs(self, run_dir: Path, resumed: bool) -> None:
        logging: LoggingConfig = self.settings["logging"]
        run_dir.mkdir(parents=True, exist_ok=True)
        write_record(run_dir / CONFIG_FILE, yaml.safe_dump(self.record, sort_keys=False))
        attention, _ = resolve_attention(self.device, DTYPES[self.training.precision], self.training.attention)
        linear, _ = resolve_linears(self.training.linears)
        ran = environment_record(self.groups.world_size, attention, linear.__name__)
        append_attempt(run_dir / ENV_FILE, {**ran, "micro_batch_size": self.dims.micro_batch_size})
        mirrors: dict[str, Any] = {}
        if logging.tensorboard:
            step = self.state.step if resumed else None
            mirrors["TensorBoard"] = lambda: TensorBoardSink(run_dir / "events", step)
        if logging.wandb:
            mirrors["wandb"] = lambda: WandbSink(
                run_dir, logging.wandb_project, self.record, artifacts=logging.wandb_artifacts
            )
        self.sinks = FanOut(JsonlSink(run_dir / METRICS_FILE), mirrors)
        self.progress = ConsoleProgress(
            headline(self.settings, self.dims, self.state, resumed=resumed), self.training.num_steps
        )

    def train(self, record: ExitRecord, preemption: PreemptionFlag, beat: Callable[[], None] = lambda: None) -> bool:
        """Run steps until the end or until asked to stop.

        A checkpoint comes before validation and pictures of its step, so that nothing that happens there loses steps.

        Args:
            record: gets the number of every step that is done.
            preemption: says whether to stop.
            beat: called after every step.

        Returns:
            Whether the run stopped early.
        """
        training, state = self.training, self.state
        checkpoint: CheckpointConfig = self.settings["checkpoint"]
        if self._agree_to_stop(preemption.requested):
            return True
        if self.progress is not None:
            self.progress.start(state.step)
        if state.step > 0 and _due(state.step, training.validation_interval) and not self._is_validated():
            self._validate(saved=True)  # the attempt before stopped, or died, between saving and validating
        traced = self.settings["logging"].profile_steps if self.groups.rank == 0 else None
        with StepProfile(Path(training.run_dir) / "profile" / "rank_0.json.gz", traced) as trace:
            started = time.perf_counter()
            loss_sums = torch.zeros(2, device=self.device)
            while state.step < training.num_steps:
                trace.before(state.step + 1)
                grad_norm = self.step(loss_sums)
                trace.after(state.step)
                record.step = state.step
                beat()
                last = state.step == training.num_steps
                stop = self._agree_to_stop(preemption.requested or state.step == training.stop_at_step)
                save = stop or last or _due(state.step, checkpoint.interval)
                # What is counted between two lines is not in a checkpoint, so a line goes before it.
                if save or state.step % training.log_interval == 0:
                    self._log(loss_sums, grad_norm, time.perf_counter() - started)
                    loss_sums.zero_()
                    started = time.perf_counter()
                training_ended = time.perf_counter()
                if save:
                    self._save()
                    stop = stop or self._agree_to_stop(preemption.requested)  # saving may have taken minutes
                if stop and not last:
                    return True
                if not stop:
                    self._look(preemption, saved=save)
                started += time.perf_counter() - training_ended  # rates are those of training alone
        return False

    def _look(self, preemption: PreemptionFlag, *, saved: bool) -> None:
        """Validate and draw pictures where this is due, as long as nobody asks the run to stop."""
        if _due(self.state.step, self.training.validation_interval):
            self._validate(saved=saved)
        if _due(self.state.step, self.training.sample_interval) and not self._agree_to_stop(preemption.requested):
            self._sample()

    def step(self, loss_sums: torch.Tensor) -> float:
        """Make one optimizer step; nothing but the gradient norm comes back to the host."""
        state, training, seen = self.state, self.training, len(self.batches.consumed.keys)
        optimizer_settings: OptimizerConfig = self.settings["optimizer"]
        for chunk in state.wrapped:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        outputs = forward_backward(
            training_forward_step(self.objective, self.model, training.seed, state.step),
            self.batches,
            state.wrapped,
            self.dims.micro_batches,
            self.groups,
        )
        lr = learning_rate(state.step, training.num_steps, optimizer_settings.lr, self.settings["schedule"])
        set_learning_rate(state.optimizer, lr)
        grad_norm = gradient_norm(state.optimizer)
        step_sums = torch.zeros_like(loss_sums)
        for output in outputs:  # on the last pipeline stage; the others report none
            step_sums += torch.stack([output["loss_sum"], output["tokens"]])
        if not math.isfinite(grad_norm):
            # A non-finite loss makes the norm non-finite on every rank, so all of them stop here, before the update.
            suspects = find_suspects(step_sums[0].item(), self.batches.consumed.keys[seen:])
            check_finite(self.mean_loss(step_sums), grad_norm, state.step + 1, suspects)
        apply_update(state.optimizer, grad_norm, optimizer_settings.clip_grad)
        loss_sums += step_sums
        state.step += 1
        if state.ema is not None:
            state.ema.update(state.step)
        return grad_norm

    def mean_loss(self, loss_sums: torch.Tensor) -> float:
        """Return the mean loss over all ranks of what `step` added up; every rank calls this and gets it."""
        sums = loss_sums.clone()
        dist.all_reduce(sums, group=self.groups.dp_cp)
        dist.all_reduce(sums, group=self.groups.pp)  # the last stage alone has losses
        return (sums[0] / sums[1]).item()

    def _log(self, loss_sums: torch.Tensor, grad_norm: float, seconds: float) -> None:
        """Reduce what was counted since the last log line, and write it."""
        loss = self.mean_loss(loss_sums)
        mine, lost = self.batches.reset(), sum(self.state.stream.skipped().values())
        counts = torch.tensor(
            [mine.samples, mine.valid_tokens, mine.padded_tokens, mine.flops, lost],
            dtype=torch.float64,
            device=self.device,
        )
        dist.all_reduce(counts, group=self.groups.dp)
        samples, valid, padded, flops, skipped = counts.tolist()
        state, ranks = self.state, self.groups.world_size
        state.consumed_samples += int(samples)
        load = expert_load(state.chunks, self.device)
        if self.sinks is None or self.progress is None:
            return
        lr = learning_rate(
            state.step - 1, self.training.num_steps, self.settings["optimizer"].lr, self.settings["schedule"]
        )
        values = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": lr,
            "samples_per_s": samples / seconds,
            "tokens_per_s": valid / seconds,
            "padded_tokens_per_s_per_rank": padded / seconds / ranks,
            "tflops_per_rank": flops / seconds / ranks / 1e12,
            "skipped_samples": skipped,
            **load,
        }
        self.sinks.scalars(state.step, values, state.consumed_samples)
        self.progress.update(state.step, values)

    def _averaged(self) -> Any:
        """Run the model with the weight average where there is one."""
        state = self.state
        return nullcontext() if state.ema is None else state.ema.applied(state.optimizer, state.wrapped)

    def _validate(self, *, saved: bool = False) -> None:
        """Measure the held-out loss; of weights that were saved already, their checkpoint gets it, too."""
        batches = self.data.build_validation(self.spec, dp_rank=self.groups.dp_rank, dp_size=self.groups.dp_size)
        with self._averaged():
            losses = held_out_loss(self.network, batches, self.objective, self.device, self.groups, self._share)
        self.state.held_out = HeldOut(losses["loss"], self.state.step)
        if self.sinks is not None and self.progress is not None:
            named = {f"held_out/{name}": value for name, value in losses.items()}
            self.sinks.scalars(self.state.step, named, self.state.consumed_samples)
            self.progress.message(f"step {self.state.step}: held-out loss {losses['loss']:.4f}")
            self.sinks.sync()
        if saved:
            self.checkpointer.attach_held_out(self.state)

    def _is_validated(self) -> bool:
        """Return whether the newest held-out loss is that of the present weights."""
        return self.state.held_out is not None and self.state.held_out.step == self.state.step

    def _sample(self) -> None:
        folder = Path(self.training.run_dir) / "samples" / f"step_{self.state.step:07d}"
        with self._averaged():
            # Every rank generates all samples: those that share a model must, the others would only wait.
            network = over_whole_packs(self.network, self.groups.cp, self.settings["parallel"].context_split)
            frames = self.pictures.draw(network, self._latent_size(), self.batches.fps, self.device)
        if self.sinks is not None and self.progress is not None:
            path = self.pictures.save(frames, folder / ("ema.png" if self.state.ema else "raw.png"), self.batches.fps)
            self.sinks.image("samples", self.state.step, path, "one sample per class or prompt")
            self.progress.message(f"step {self.state.step}: samples {path}")

    def _latent_size(self) -> tuple[int, int, int]:
        """Return (T, H, W) of the largest latent the run has trained on."""
        assert self.batches.largest_grid is not None
        t, h, w = self.batches.largest_grid
        return t * self.spec.patch_temporal, h * self.spec.patch_spatial, w * self.spec.patch_spatial

    def _save(self) -> None:
        if self.sinks is not None:
            self.sinks.sync()
        facts = {
            "class_names": self.class_names,
            "latent_size": list(self._latent_size()),
            "fps": self.batches.fps,
            "text_encoder": self.text_encoder,
        }
        path = self.checkpointer.save(self.state, facts)
        if self.sinks is not None and self.progress is not None:
            self.sinks.artifact(path, {"step": self.state.step, **held_out_meta(self.state.held_out)})
            self.progress.message(f"step {self.state.step}: checkpoint {path}")

    def _agree_to_stop(self, wanted: bool) -> bool:
        flag = torch.tensor([float(wanted)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def summarize(self) -> None:
        """End the output with two lines: how the run went, and the command that draws from it."""
        if self.progress is None:
            return
        self.progress.close()  # the live line comes before them
        run_dir = self.training.run_dir
        seconds = time.monotonic() - self.began
        went = how_it_went(Path(run_dir) / METRICS_FILE, self.state.step, self.training.num_steps, seconds)
        self.progress.message(went)
        frames = 1 if self.batches.largest_grid is None else self._latent_size()[0]
        encoder = None if self.model.context_size is None else self.text_encoder
        prompts = self.settings["sampling"].prompts
        self.progress.message(f"draw from it: {drawing_command(run_dir, frames, encoder, prompts)}")

    def close(self) -> None:
        """Stop loaders and flush logs."""
        self.state.stream.close()
        if self.progress is not None:
            self.progress.close()
        if self.sinks is not None:
            self.sinks.close()


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
