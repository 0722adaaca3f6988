"""The training loop: `pretrain` sets up a run, `train` is the loop, `Run` has the actions that the loop calls."""

import logging as log
import math
import os
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist

from dit.backends import process_groups
from dit.backends.device import local_device
from dit.backends.process_groups import ProcessGroups, any_rank
from dit.batch import PackedBatch
from dit.checkpoint.checkpointer import Checkpointer
from dit.checkpoint.manifest import HeldOut
from dit.checkpoint.store import CheckpointStore
from dit.checkpoint.train_state import build_state
from dit.checkpoint.warm_start import start_from
from dit.condition_table import CONTEXT
from dit.context_parallel.shard_batch import on_full_packs, shard
from dit.data_api import BatchSpec, DataConfig
from dit.encoders.online import batch_encoder
from dit.errors import EXIT_PREEMPTED, NotFiniteError
from dit.inference.preview import PictureWriter
from dit.models.base import ModelConfig
from dit.monitoring.exit_record import ExitRecord
from dit.monitoring.expert_load import expert_load
from dit.monitoring.flops import PackFlops
from dit.monitoring.guards import PreemptionFlag, StackWatchdog, check_finite
from dit.monitoring.profile import StepProfile
from dit.monitoring.run_lock import RunLock
from dit.monitoring.run_log import RunLog, open_log
from dit.objectives.base import Objective
from dit.optimizer.master_weights import apply_update, gradient_norm, set_rates
from dit.optimizer.schedules import Schedule, learning_rate, momentum
from dit.parallel.dims import ParallelConfig, ParallelDims
from dit.parallel.schedule import FullNetwork, forward_backward
from dit.ranges import check_path
from dit.run_config import RunConfig
from dit.settings import (
    CheckpointConfig,
    LoggingConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainingConfig,
)
from dit.training.device_batches import DeviceBatches
from dit.training.hooks import load_hooks
from dit.training.step import find_suspects, training_forward_step
from dit.training.validate import held_out_loss, named_losses

logger = log.getLogger(__name__)

STACK_DUMP_AFTER_S = 300.0


def pretrain(
    model: ModelConfig,
    data: DataConfig,
    objective: Objective,
    optimizer: OptimizerConfig,
    schedule: Schedule,
    parallel: ParallelConfig,
    training: TrainingConfig,
    checkpoint: CheckpointConfig,
    logging: LoggingConfig,
    sampling: SamplingConfig,
) -> None:
    """Train a backbone; the same call resumes a stopped run.

    Every rank calls this. It locks the run folder and always writes `exit.json` into it.

    Raises:
        ConfigError: the settings contradict each other, or the checkpoint to resume (no record is overwritten); or
            another process writes to the run folder (nothing is written).
        DataError: data are missing, unreadable or lost beyond the budget.
        NotFiniteError: the loss or the gradient norm is not finite; the weights are those before the step.
        CheckpointError: there is no valid checkpoint but one is required, or writing failed.
        SystemExit: with code 75 if stopped early, after a checkpoint or before the first step.
    """
    config = RunConfig(
        model=model,
        data=data,
        objective=objective,
        optimizer=optimizer,
        schedule=schedule,
        parallel=parallel,
        training=training,
        checkpoint=checkpoint,
        logging=logging,
        sampling=sampling,
    )
    rank = int(os.environ.get("RANK", "0"))
    check_path("training.run_dir", training.run_dir)  # the lock and the exit record need it
    with (
        PreemptionFlag() as preemption,
        RunLock(training.run_dir, rank) as lock,
        ExitRecord(training.run_dir, rank, lock.is_ours) as record,
    ):
        with preemption.leaves_at_once():
            process_groups.connect()
            lock.agree()
            dims, spec = config.check_here()
            for line in (*config.adaptations(dims), *config.unused_conditions()) if rank == 0 else ():
                logger.info(line)
        with StackWatchdog(Path(training.run_dir) / "stacks" / f"rank_{rank}.txt", STACK_DUMP_AFTER_S) as watchdog:
            with preemption.leaves_at_once():
                groups = process_groups.initialize(parallel)
                run = Run(config, dims, spec, groups)
                record.step = run.state.step
                preemption.waits_from_here()
                dist.barrier()  # from here on all ranks stop together
            try:
                record.preempted = train(run, record, preemption, watchdog.beat)
                run.summarize()
            finally:
                run.close()
            process_groups.destroy()
    if record.preempted:
        sys.exit(EXIT_PREEMPTED)


def train(run: "Run", record: ExitRecord, preemption: PreemptionFlag, beat: Callable[[], None] = lambda: None) -> bool:
    """Run steps until the end, or until a request to stop: the training loop.

    A checkpoint is saved before validation and sampling of its step, so that an error there loses no step.

    Args:
        run: the state and the actions.
        record: gets the number of every completed step.
        preemption: the request to stop.
        beat: called after every step.

    Returns:
        Whether the run stopped early.
    """
    config, state, training = run.config, run.state, run.config.training
    if any_rank(preemption.requested):
        return True
    run.log.start(state.step)
    if state.step > 0 and _is_multiple(state.step, training.validation_interval) and not state.is_validated:
        run.validate(saved=True)  # the previous attempt ended between saving and validating
    if state.step == 0 and training.sanity_micro_batches:
        run.check_validation(training.sanity_micro_batches)
    traced = config.logging.profile_steps if run.groups.rank == 0 else None
    with StepProfile(Path(training.run_dir) / "profile" / "rank_0.json.gz", traced) as trace:
        started = time.perf_counter()
        loss_sums = torch.zeros(len(config.objective.logged) + 1, device=run.device)
        while state.step < training.num_steps:
            trace.before(state.step + 1)
            grad_norm = run.step(loss_sums)
            trace.after(state.step)
            record.step = state.step
            for hook in run.hooks:
                hook.on_step(state, grad_norm)
            beat()
            last = state.step == training.num_steps
            stop = any_rank(preemption.requested or state.step == training.stop_at_step)
            save = stop or last or _is_multiple(state.step, config.checkpoint.interval)
            # The counts since the last line are not in a checkpoint, so report them before.
            if save or state.step % training.log_interval == 0:
                run.report(loss_sums, grad_norm, time.perf_counter() - started)
                loss_sums.zero_()
                started = time.perf_counter()
            training_ended = time.perf_counter()
            if save:
                run.save()
                stop = stop or any_rank(preemption.requested)  # saving may have taken minutes
            if stop and not last:
                return True
            if not stop and _is_multiple(state.step, training.validation_interval):
                run.validate(saved=save)
            if not stop and _is_multiple(state.step, training.sample_interval) and not any_rank(preemption.requested):
                run.sample()
            started += time.perf_counter() - training_ended  # rates exclude saving and validation
    return False


def _is_multiple(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


class Run:
    """The state of one rank in a run, and the actions of the training loop.

    Args:
        config: checked settings.
        dims, spec: results of `RunConfig.check_here`.
        groups: the process groups.
        quiet: do not log (benchmarks).

    Attributes:
        state: all that a step changes.
        batches: micro-batches on this rank's device.
        hooks: what the loop calls after steps and validations.
    """

    def __init__(
        self, config: RunConfig, dims: ParallelDims, spec: BatchSpec, groups: ProcessGroups, *, quiet: bool = False
    ) -> None:
        self.config, self.dims, self.spec, self.groups = config, dims, spec, groups
        self.hooks = load_hooks(config.training.hooks)
        self.began = time.monotonic()
        self.device = local_device()
        # The members of a blend need to agree only on conditions of the model.
        self.class_names = None if config.model.num_classes is None else config.data.class_names()
        self.state = build_state(config, spec, groups)
        self.network = FullNetwork(self.state.wrapped, groups)
        store = CheckpointStore(Path(config.training.run_dir) / "checkpoints", config.checkpoint)
        self.checkpointer = Checkpointer(store, config)
        resumed = self.checkpointer.resume(self.state, config.checkpoint.resume)
        if not resumed and config.checkpoint.start_from is not None and self.state.base is None:
            start_from(config.checkpoint.start_from, self.state)
        flops = PackFlops(config.model)
        self.encode = batch_encoder(config.data.online_encoding(), spec, self.device, groups.tp_cp)
        self.batches = DeviceBatches(
            self.state.stream,
            self.device,
            spec,
            lambda batch: flops.training(batch.layout, batch.grids, batch.conditions.layout(CONTEXT.name)),
            self.shard,
            self.encode,
        )
        if resumed:
            self.batches.recall_largest(self.checkpointer.resumed_metadata, spec)
        self.text_encoder = None if config.model.context_size is None else config.data.text_encoder()
        self.autoencoder = config.sampling.vae or config.data.autoencoder()
        self.attributions = config.data.attributions()
        self.pictures = PictureWriter(
            config.model,
            config.objective,
            spec,
            config.sampling,
            self.class_names,
            self.text_encoder,
            self.autoencoder if config.training.sample_interval else None,
        )
        reports = groups.rank == 0 and not quiet
        if reports and config.training.sample_interval and self.pictures.note:
            logger.info(self.pictures.note)
        self.log = open_log(config, dims, self.state, resumed=resumed) if reports else RunLog()

    def shard(self, batch: PackedBatch) -> PackedBatch:
        """Return the local part of a full pack on this context-parallel rank."""
        return shard(batch, self.groups.cp.rank(), self.groups.cp.size(), self.config.parallel.context_split)

    def step(self, loss_sums: torch.Tensor) -> float:
        """Run one optimizer step; only the gradient norm is copied to the host.

        Args:
            loss_sums: `[logged + 1]`; this rank's sums of what the objective logs, and of the tokens, are added to it.

        Returns:
            The global gradient norm before clipping.

        Raises:
            NotFiniteError: the loss or the gradient norm is not finite; the weights are those before the step.
        """
        config, state, seen = self.config, self.state, len(self.batches.consumed.keys)
        for chunk in state.wrapped:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        outputs = forward_backward(
            training_forward_step(config.objective, config.model, config.training.seed, state.step),
            self.batches,
            state.wrapped,
            self.dims.micro_batches,
            self.groups,
        )
        length, schedule, beta1 = config.training.num_steps, config.schedule, config.optimizer.beta1
        set_rates(state.optimizer, self.learning_rate(state.step), momentum(state.step, length, beta1, schedule))
        grad_norm = gradient_norm(state.optimizer)
        step_sums = torch.zeros_like(loss_sums)
        for output in outputs:  # empty but on the last pipeline stage
            step_sums += output["sums"]
        if not math.isfinite(grad_norm):
            # A non-finite loss makes the norm non-finite on every rank: all stop here, before the update.
            suspects = find_suspects(step_sums[:-1].sum().item(), self.batches.consumed.keys[seen:])
            check_finite(self.mean_loss(step_sums), grad_norm, state.step + 1, suspects)
        apply_update(state.optimizer, grad_norm, config.optimizer.clip_grad)
        loss_sums += step_sums
        state.step += 1
        if state.ema is not None:
            state.ema.update(state.step)
        return grad_norm

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the update after `step` updates."""
        return learning_rate(step, self.config.training.num_steps, self.config.optimizer.lr, self.config.schedule)

    def mean_loss(self, loss_sums: torch.Tensor) -> float:
        """Return the mean loss over all ranks from the sums of `step`; every rank calls this."""
        return named_losses(self.config.objective, self.mean_terms(loss_sums))["loss"]

    def mean_terms(self, loss_sums: torch.Tensor) -> list[float]:
        """Return the mean of each term and measure of the loss over all ranks; every rank calls this."""
        sums = loss_sums.clone()
        dist.all_reduce(sums, group=self.groups.dp_cp)
        dist.all_reduce(sums, group=self.groups.pp)  # only the last stage has losses
        return (sums[:-1] / sums[-1]).tolist()

    def report(self, loss_sums: torch.Tensor, grad_norm: float, seconds: float) -> None:
        """Reduce the counts since the last line over ranks, and report them.

        Args:
            loss_sums: of the steps since then, see `step`.
            grad_norm: of the newest step.
            seconds: duration of these steps.
        """
        terms, state, ranks = self.mean_terms(loss_sums), self.state, self.groups.world_size
        mine, lost = self.batches.reset(), sum(state.stream.skipped().values())
        counts = torch.tensor(
            [mine.samples, mine.valid_tokens, mine.padded_tokens, sum(mine.flops), lost, state.stream.samples_per_s()],
            dtype=torch.float64,
            device=self.device,
        )
        dist.all_reduce(counts, group=self.groups.dp)
        samples, valid, padded, flops, skipped, made_per_s = counts.tolist()
        state.consumed_samples += int(samples)
        # Replicas wait for each other at the end of each step: the step lasts as long as the most work of one of them.
        steps = torch.tensor(mine.flops, dtype=torch.float64, device=self.device).view(-1, self.dims.micro_batches)
        slowest = torch.cat([steps.sum(1), steps.new_tensor([mine.waited_s])])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.groups.dp)
        load = expert_load(state.chunks, self.device)
        values = {
            **named_losses(self.config.objective, terms),
            "grad_norm": grad_norm,
            "learning_rate": self.learning_rate(state.step - 1),
            "samples_per_s": samples / seconds,
            "tokens_per_s": valid / seconds,
            "padded_tokens_per_s_per_rank": padded / seconds / ranks,
            "tflops_per_rank": flops / seconds / ranks / 1e12,
            "padding_share": 1 - valid / padded,
            "work_imbalance": slowest[:-1].sum().item() * self.groups.dp_size / flops,
            "data_wait_share": slowest[-1].item() / seconds,
            "loader_samples_per_s": made_per_s,
            "skipped_samples": skipped,
            **load,
        }
        state.training_loss = values["loss"]
        self.log.scalars(state, values)

    def save(self) -> None:
        """Write a checkpoint of this step."""
        self.log.sync()
        metadata = {
            "class_names": self.class_names,
            "latent_size": list(self.batches.latent_size(self.spec)),
            "fps": self.batches.fps,
            "text_encoder": self.text_encoder,
            "autoencoder": self.autoencoder,
            "attributions": self.attributions,
        }
        self.log.checkpoint(self.state, self.checkpointer.save(self.state, metadata))

    def validate(self, *, saved: bool = False) -> None:
        """Measure the held-out loss; if the weights are `saved`, add it to their checkpoint."""
        state = self.state
        with state.averaged():
            losses = self.held_out_losses()
        compared = self.config.training.validate_raw_weights and state.ema is not None
        raw = self.held_out_losses() if compared else None
        state.held_out = HeldOut(losses["loss"], state.step)
        self.log.held_out(state, losses, raw)
        if saved:
            self.checkpointer.attach_held_out(state)
        for hook in self.hooks:
            hook.on_validation(state, losses)

    def check_validation(self, micro_batches: int) -> None:
        """Measure the held-out loss of the first micro-batches of each data-parallel rank, before step 1.

        Raises:
            NotFiniteError: it is not finite.
        """
        loss = self.held_out_losses(micro_batches)["loss"]
        if not math.isfinite(loss):
            raise NotFiniteError(
                f"the held-out loss of the initial weights is {loss}, over {micro_batches} micro-batches of each "
                "data-parallel rank; look for such values in the held-out data, or at the initial weights"
            )
        self.log.message(f"step 0: held-out loss {loss:.4f}, over {micro_batches} micro-batches of each rank")

    def held_out_losses(self, micro_batches: Optional[int] = None) -> dict[str, float]:
        """Return the held-out losses of the weights that the model has.

        Args:
            micro_batches: of each data-parallel rank; None for all.
        """
        config, groups = self.config, self.groups
        passed = config.data.build_validation(self.spec, dp_rank=groups.dp_rank, dp_size=groups.dp_size)
        batches = map(self.encode, islice(passed, micro_batches))
        return held_out_loss(self.network, batches, config.objective, config.model, self.device, groups, self.shard)

    def sample(self) -> None:
        """Generate the grid of samples and write it into the run folder."""
        state, fps = self.state, self.batches.fps
        with state.averaged():
            # Every rank generates all samples: model-parallel ranks must, and data-parallel ones would only wait.
            network = on_full_packs(self.network, self.groups.cp, self.config.parallel.context_split)
            frames = self.pictures.draw(
                network, self.batches.latent_size(self.spec), fps, self.device, lay_out=not self.log.is_silent
            )
        if frames:
            folder = Path(self.config.training.run_dir) / "samples" / f"step_{state.step:07d}"
            path = self.pictures.save(frames, folder / ("ema.png" if state.ema else "raw.png"), fps)
            self.log.samples(state, path)

    def summarize(self) -> None:
        """Print the result of the run, and the command that samples from it."""
        frames = 1 if self.batches.largest_grid is None else self.batches.latent_size(self.spec)[0]
        seconds = time.monotonic() - self.began
        self.log.summarize(self.config, self.state, seconds=seconds, frames=frames, text_encoder=self.text_encoder)

    def close(self) -> None:
        """Stop loaders and flush logs."""
        self.state.stream.close()
        self.log.close()
