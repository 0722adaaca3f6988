"""The training loop: `pretrain` sets up a run, `train` is the loop, `Run` has the actions that the loop calls."""

import logging as log
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist

from dit.backends import process_groups
from dit.backends.deterministic import deterministic
from dit.backends.device import StepTimer, explained_out_of_memory, local_device
from dit.backends.graphs import runner
from dit.backends.process_groups import ProcessGroups, any_rank
from dit.batch import PackedBatch
from dit.checkpoint.checkpointer import Checkpointer
from dit.checkpoint.manifest import HeldOut
from dit.checkpoint.records import METADATA_FILE, usable
from dit.checkpoint.saves import Saves
from dit.checkpoint.store import CheckpointStore
from dit.checkpoint.train_state import build_state
from dit.checkpoint.warm_start import start_from
from dit.context_parallel.shard_batch import on_full_packs, shard
from dit.data_api import BatchSpec, DataConfig
from dit.encoders.online import batch_encoder, null_texts
from dit.encoders.pretrained import recorded_name
from dit.errors import EXIT_PREEMPTED
from dit.inference.preview import PictureWriter, held_out_pictures
from dit.models.base import ModelConfig
from dit.monitoring.exit_record import ExitRecord
from dit.monitoring.expert_load import expert_load
from dit.monitoring.flops import PackFlops
from dit.monitoring.guards import PreemptionFlag, StackWatchdog
from dit.monitoring.heartbeat import Heartbeat, Phase
from dit.monitoring.profile import StepProfile
from dit.monitoring.run_lock import RunLock
from dit.monitoring.run_log import RunLog, open_log
from dit.monitoring.time_limit import TimeLimit
from dit.objectives.base import Objective
from dit.optimizer.part_norms import PartNorms
from dit.optimizer.schedules import Schedule
from dit.parallel import verified_kernels
from dit.parallel.dims import ParallelConfig, ParallelDims
from dit.parallel.full_network import FullNetwork
from dit.ranges import check_path
from dit.run_config import RunConfig
from dit.safe_files import make_folder
from dit.settings import CheckpointConfig, LoggingConfig, OptimizerConfig, SamplingConfig, TrainingConfig
from dit.step.balance import BalancedPacks, Packs, balanced
from dit.step.cuda_graph import schedule_of
from dit.step.device_batches import DeviceBatches
from dit.step.forward_step import ForwardStep, noise_kernel, training_forward_step
from dit.step.intervals import is_due
from dit.step.train_step import Action, Step, StepFunctions, settle, train_step
from dit.step_checks.bad_steps import BadSteps
from dit.step_checks.recheck import Recheck
from dit.step_checks.run_checks import RunChecks
from dit.step_checks.wiring import FirstSteps
from dit.training.drops import DropReport
from dit.training.hooks import load_hooks
from dit.training.late import may_be_late
from dit.training.rates import counters, mean_terms, memory_peaks, rank_times, rates, report_progress
from dit.training.start_weights import download_start, start_remarks
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
        ConfigError: the settings contradict each other or those of the checkpoint to resume, or another process writes
            to the run folder. The files of an earlier run are not changed.
        DataError: data are missing or unreadable, or more samples are damaged than `data.max_lost_samples`.
        NotFiniteError: the loss or the gradient norm is not finite; the weights are those before the step.
        DeviceMemoryError: a GPU has too little memory.
        CheckpointError: a required checkpoint is missing or damaged, or a save failed.
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
    training.check_time_out()  # the process groups need it
    with (
        deterministic(training.deterministic),
        PreemptionFlag() as preemption,
        RunLock(training.run_dir, rank, waiting=preemption.exit_immediately) as lock,
        ExitRecord(training.run_dir, rank, lock.is_ours) as record,
        explained_out_of_memory(),
    ):
        with preemption.exit_immediately():
            download_start(config)  # may take longer than a collective may
            process_groups.connect(timeout_s=training.collective_timeout_s)
            lock.agree()
            verified_kernels.agree()
            dims, spec = config.check_here()
            for line in [*start_remarks(config), *config.remarks(dims, spec)] if rank == 0 else ():
                logger.info(line)
        with (
            StackWatchdog(Path(training.run_dir) / "stacks" / f"rank_{rank}.txt", STACK_DUMP_AFTER_S) as watchdog,
            Heartbeat(training.run_dir, rank, dist.get_world_size(), training.hang_timeout_s, lock.is_ours) as heart,
        ):
            record.explain = heart.explain
            with preemption.exit_immediately():
                groups = process_groups.initialize(parallel, timeout_s=training.collective_timeout_s)
                run = Run(config, dims, spec, groups, lock=lock.descriptor, phase=heart.phase)
                record.step = run.state.step
                preemption.defer_signals()
                dist.barrier()  # from here on all ranks stop together
            with closing(run):
                record.preempted = train(run, record, preemption, watchdog.beat)
                run.summarize()
            process_groups.destroy()
    if record.preempted:
        sys.exit(EXIT_PREEMPTED)


def train(run: "Run", record: ExitRecord, preemption: PreemptionFlag, beat: Callable[[], None] = lambda: None) -> bool:
    """Run steps until the end, or until a request to stop: the training loop.

    A checkpoint is saved before validation and sampling of its step, so that an error there loses no step.

    Returns:
        True if the run stopped early, or in its last step without the validation or the samples that were due.
    """
    config, state, training = run.config, run.state, run.config.training
    if any_rank(preemption.requested):
        return True
    run.log.start(state.step)
    if state.step > 0:  # the previous attempt may have ended between saving and these, or left a file `*.part`
        if is_due(state.step, training.validation_interval) and not state.is_validated:
            run.validate(saved=True)
        drawn = any(run.samples_folder.glob("*.???"))
        if is_due(state.step, training.sample_interval) and not any_rank(drawn or preemption.requested):
            run.sample()
    if training.stop_at_step is not None and state.step >= training.stop_at_step:
        return False  # not code 75, after which launch/train.sh would start it again and again
    limit = TimeLimit(training.time_limit)
    if state.step < training.num_steps:
        limit.check()
    run.checks.asks_to_stop = lambda: (
        limit.is_near(run.saves.longest_s)
        or preemption.requested
        or state.step + 1 == training.stop_at_step != training.num_steps
    )
    run.check_first_steps()
    traced = config.logging.profile_steps if run.groups.rank == 0 else None
    with StepProfile(Path(training.run_dir) / "profile" / "rank_0.json.gz", traced) as trace:
        started = time.perf_counter()
        loss_sums = torch.zeros(len(config.objective.logged) + 1, device=run.device)
        while state.step < training.num_steps:
            run.phase.enter("computes", state.step)
            trace.before(state.step + 1)
            try:
                run.step(loss_sums, late=run.may_be_late())
            finally:
                record.step = state.step
            trace.after(state.step)
            run.phase.enter("ends the step", state.step)
            beat()
            if run.last_action == "rewind":
                loss_sums.zero_()
                started = time.perf_counter()
                continue
            for hook in run.hooks if run.last_action == "update" else ():
                hook.on_step(state, run.grad_norm)
            last = state.step == training.num_steps
            stop = run.must_stop
            if stop and state.step != training.stop_at_step:
                run.log.stops(state.step, preemption.signal_name or limit.reason())
            run.saves.poll()
            save = stop or last or is_due(state.step, config.checkpoint.interval)
            # The counts since the last line are not in a checkpoint, so report them before.
            if save or state.step % training.log_interval == 0:
                counted = time.perf_counter()  # `report` waits for the device, which may still update the weights
                run.report(loss_sums, counted - started)
                loss_sums.zero_()
                started = counted
            training_ended = time.perf_counter()
            if save:
                run.save()
                if not stop and any_rank(preemption.requested):  # saving may have taken minutes
                    stop = True
                    run.log.stops(state.step, preemption.signal_name or limit.reason())
            validates = is_due(state.step, training.validation_interval)
            samples = is_due(state.step, training.sample_interval)
            if stop and (not last or validates or samples):  # the next start validates and samples
                run.saves.finish()
                return True
            if validates:
                run.validate(saved=save)
            if samples and (last or not any_rank(preemption.requested)):
                run.sample()
            started += time.perf_counter() - training_ended  # rates exclude saving and validation
    if run.checks.first_steps is not None:
        run.checks.first_steps.end(state.step, run.log)
    run.saves.finish()
    return False


class Run:
    """The state of one rank in a run, and the actions of the training loop.

    Args:
        dims, spec: results of `RunConfig.check_here`.
        quiet: whether not to log (for benchmarks).
        lock: descriptor of the run's lock, for the process that writes checkpoints; -1 for none.
        phase: phase of this rank, for its heartbeat.

    Attributes:
        packs: full packs that this rank computes.
        batches: micro-batches on this rank's device.
        functions: forward step and rates of every step.
        last_action: use of the newest gradients, as far as they were read.
        grad_norm: gradient norm of the newest update that was read.
    """

    _pending: Optional[Step] = None
    last_action: Action = "update"
    must_stop = False
    grad_norm = 0.0

    def __init__(
        self,
        config: RunConfig,
        dims: ParallelDims,
        spec: BatchSpec,
        groups: ProcessGroups,
        *,
        quiet: bool = False,
        lock: int = -1,
        phase: Optional[Phase] = None,
    ) -> None:
        self.phase, self.timer = phase or Phase(), StepTimer()
        self.config, self.dims, self.spec, self.groups = config, dims, spec, groups
        self.hooks = load_hooks(config.training.hooks)
        self.began = time.monotonic()
        self.device = local_device()
        self.mix = noise_kernel(config.model, config.training)
        # The members of a blend need to agree only on conditions of the model.
        self.class_names = None if config.model.condition("label") is None else config.data.class_names()
        self.state = build_state(config, spec, groups)
        self.network = FullNetwork(self.state.wrapped, groups)
        store = CheckpointStore(Path(config.training.run_dir) / "checkpoints", config.checkpoint)
        self.checkpointer = Checkpointer(store, config)
        self.bad_steps = BadSteps(config, self.state, groups)
        resumed = self.checkpointer.resume(self.state, config.checkpoint.resume)
        if not resumed and config.checkpoint.start_from is not None:
            start_from(config, self.state)
        cost = PackFlops(config.model, config.objective.auxiliary).of_pack
        nulls, longest_text = null_texts(config.data, spec.conditions, self.device), config.data.longest_text
        self.encode = batch_encoder(config.data.online_encoding(), spec, self.device, groups.tp_cp, nulls)
        self.packs: Packs = balanced(self.state.stream, cost, dims.micro_batches, groups)
        maxima, train = config.fixed_packs(spec), self.train_shard
        flops = cost if groups.is_data_reader else lambda _: 0  # `rates` adds those of the readers
        self.batches = DeviceBatches(self.packs, self.device, spec, flops, train, self.encode, self.phase, maxima)
        self.part_norms = PartNorms(self.state.optimizer, self.state.shards, config.training.log_interval)
        schedule, run_numbers = schedule_of(config.training), runner(graphed=config.training.cuda_graph)
        per_step = self.forward_step, self.rates, dims.micro_batches
        self.functions = StepFunctions(config.objective, *per_step, schedule, run_numbers)
        report_progress(self.state.wrapped, self.timer, self.phase)
        if resumed:
            with usable(store.root / METADATA_FILE):
                self.batches.restore_largest(self.checkpointer.resumed_metadata)
                self.bad_steps.load_state_dict(self.checkpointer.resumed_metadata)
        self.text_encoder = None if config.model.condition("context") is None else config.data.text_encoder()
        vae = config.sampling.vae or config.data.autoencoder()
        self.autoencoder = None if vae is None else recorded_name(vae)
        self.attributions, self.reference_aspect = config.data.attributions(), config.data.reference_aspect()
        decoder = self.autoencoder if config.training.sample_interval else None
        drawn = config.model, config.objective, replace(spec, conditions=config.model.conditions()), config.sampling
        self.pictures = PictureWriter(*drawn, self.class_names, self.text_encoder, decoder, nulls, longest_text)
        reports = groups.rank == 0 and not quiet
        if reports and config.training.sample_interval and self.pictures.note:
            logger.info(self.pictures.note)
        self.log = open_log(config, dims, self.state, resumed=resumed) if reports else RunLog()
        self.drops = DropReport.restored(self.state, groups)
        self.saves = Saves(self.checkpointer, self.state, self.log, self.phase.go_on, lock)
        checked = self.batches, Recheck(self.state, config.training, self.bad_steps.drop_counts), self.bad_steps
        self.checks = RunChecks(*checked, self.part_norms, self.learning_rate, self.timer, self.phase, self.log)

    def check_first_steps(self) -> None:
        """Check the next inputs, and from now on the gradients of the first steps; see `FirstSteps`."""
        if self.state.step < self.config.training.num_steps:
            idle = self.config.objective.auxiliary.idle(self.state.step)
            shards = [shard for shard in self.state.shards if not shard.name.startswith(idle)]
            self.checks.first_steps = FirstSteps(shards, self.groups)
            pack = self.batches.peek()
            if isinstance(self.packs, BalancedPacks):
                pack = self.packs.read[0]  # packs of replicas are compared as they were read, not as they were dealt
            self.checks.first_steps.check_inputs(pack, self.state.step + 1, self.log)

    def shard(self, batch: PackedBatch) -> PackedBatch:
        """Return the local part of a full pack on this context-parallel rank."""
        return shard(batch, self.groups.cp.rank(), self.groups.cp.size(), self.config.parallel.context_split)

    def train_shard(self, batch: PackedBatch) -> PackedBatch:
        """Return the local part of a full pack for a training step."""
        return self.shard(self.config.objective.of_full_pack(batch))

    def step(self, loss_sums: torch.Tensor, *, late: bool = False) -> float:
        """Run one optimizer step; a step with bad numbers makes no update on any rank, see `BadSteps`.

        Args:
            loss_sums: `[logged + 1]`; an update adds the local sums of the logged terms and of the tokens.
            late: whether the next call reads the numbers of this step, unless the run must stop.

        Returns:
            The global gradient norm before clipping; infinite if fp16 gradients overflowed, NaN if it is read late.
        """
        previous, self._pending = self._pending, None
        step = train_step(self.state, self.batches, self.functions, self.checks, previous, late=late)
        if previous is not None:
            self._count(previous, loss_sums)
        if step.is_pending and self.must_stop:
            settle(self.state, step, self.checks)
        if step.is_pending:
            self.last_action, self._pending = "update", step
            return math.nan
        self._count(step, loss_sums)
        return step.grad_norm

    def _count(self, step: Step, loss_sums: torch.Tensor) -> None:
        self.last_action = step.action
        self.must_stop |= step.must_stop and step.action != "rewind"  # the next step asks again
        if step.action == "update":
            loss_sums += step.sums
            self.grad_norm = step.grad_norm
        elif step.action == "rewind":
            self.rewind(step.number)

    def may_be_late(self) -> bool:
        """Return whether the numbers of the next step may be read late."""
        checked = self.checks.first_steps is None or self.checks.first_steps.done
        return checked and may_be_late(self.config, self.state, self.state.step + 1)

    def forward_step(self, step: int) -> ForwardStep:
        """Return the forward step that follows `step` completed steps."""
        config = self.config
        return training_forward_step(config.objective, config.model, config.training.seed, step, self.mix)

    def rates(self, step: int) -> tuple[float, float]:
        """Return learning rate and Adam's beta1 of the update that follows `step` completed steps."""
        length, beta1 = self.config.training.num_steps, self.config.optimizer.beta1
        return self.learning_rate(step), self.config.schedule.momentum(step + 1, length, beta1)

    def rewind(self, bad_step: int) -> None:
        """Go back to the last checkpoint, and save it again with the current position of the data.

        A run that is killed afterwards resumes without the skipped data. A run that is killed before repeats the step
        and the decision.
        """
        self.saves.wait()  # a pending save may become the last checkpoint
        self.phase.enter("starts")  # reading and hashing a checkpoint may take as long as at the start
        self.bad_steps.go_back(bad_step, self.checkpointer, self.log, self.batches.reset().keys)
        self.save()
        self.saves.wait()

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the update that follows `step` completed steps."""
        config = self.config
        return config.schedule.rate(step + 1, config.training.num_steps, config.optimizer.lr)

    def report(self, loss_sums: torch.Tensor, seconds: float) -> None:
        """Reduce the counts since the last line over ranks, and report them.

        Args:
            loss_sums: sums of the steps since the last line, see `step`; zeros without an update.
        """
        terms, state, consumed = mean_terms(loss_sums, self.groups), self.state, self.batches.reset()
        samples, counted = rates(consumed, state.stream, self.groups, self.dims.micro_batches, seconds, self.device)
        state.consumed_samples += samples
        losses = {**named_losses(self.config.objective, terms), "grad_norm": self.grad_norm}
        values = {
            **(losses if terms[0] == terms[0] else {}),  # without an update, the means are 0 / 0
            **self.part_norms.take(),
            "learning_rate": self.learning_rate(state.step - 1),
            **counted,
            **counters(state, self.bad_steps.skipped),
            **rank_times(self.timer.take(), self.groups, self.device),
            **memory_peaks(self.device),
            **expert_load(state.chunks, self.device),
        }
        self.drops.report(state, int(counted["dropped_samples"]), self.groups, self.log)
        self.log.scalars(state, values)

    def save(self) -> None:
        """Save a checkpoint of this step, in the background if possible."""
        self.phase.enter("saves")
        self.log.sync()
        size, fps = self.batches.share_largest()
        metadata = {
            "class_names": self.class_names,
            "latent_size": list(size),
            "fps": fps,
            "text_encoder": self.text_encoder,
            "autoencoder": self.autoencoder,
            "attributions": self.attributions,
            "reference_aspect": self.reference_aspect,
            **self.bad_steps.state_dict(),
        }
        self.saves.save(self.state, metadata)

    def validate(self, *, saved: bool = False) -> None:
        """Measure the held-out loss; if the weights are `saved`, add it to their checkpoint."""
        config, state, groups = self.config, self.state, self.groups
        self.phase.enter("validates")
        held_out = config.data.build_validation(self.spec, dp_rank=groups.dp_rank, dp_size=groups.dp_size)
        batches = (self.spec.check(self.encode(batch)) for batch in held_out)
        inputs = batches, config.objective, config.model, self.device, groups, self.shard
        with state.averaged():
            losses = held_out_loss(self.network, *inputs)
        state.held_out = HeldOut(losses["loss"], state.step)
        self.log.held_out(state, losses)
        if saved:
            self.saves.attach_held_out(state)
        for hook in self.hooks:
            hook.on_validation(state, losses)

    @property
    def samples_folder(self) -> Path:
        """Folder of the grids of the current step."""
        return Path(self.config.training.run_dir) / "samples" / f"step_{self.state.step:07d}"

    def sample(self) -> None:
        """Generate the grids of samples and write them into the run folder."""
        self.phase.enter("samples")
        # Every rank generates all samples: model-parallel ranks must, and data-parallel ones would only wait.
        network = on_full_packs(self.network, self.groups.cp, self.config.parallel.context_split)
        typical = self.batches.share_typical()
        averaged = self.state.averaged if self.state.ema else None
        folder = None if self.log.is_silent else make_folder(self.samples_folder.parent) / self.samples_folder.name
        held_out = held_out_pictures(self.config, self.spec, self.encode)
        paths = self.pictures.write(network, *typical, folder, averaged, held_out)
        for name, path in paths.items():
            self.log.samples(self.state, path, name)

    def summarize(self) -> None:
        """Print the result of the run, and the command that samples from it."""
        frames = 1 if self.batches.largest is None else self.batches.latent_size()[0]
        seconds = time.monotonic() - self.began
        self.log.summarize(self.config, self.state, seconds=seconds, frames=frames, text_encoder=self.text_encoder)

    def close(self) -> None:
        """Stop loaders, let the pending save end, and flush logs."""
        self.state.stream.close()
        self.saves.close()
        self.log.close()
