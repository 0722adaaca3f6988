"""Settings of a training run; `validate` raises `ConfigError` with the number and its range."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, Optional

from dit.errors import ConfigError
from dit.ranges import (
    COUNT,
    COUNT_OR_ZERO,
    FINITE,
    LOSS_SCALE,
    NOT_NEGATIVE,
    POSITIVE,
    RELATIVE_LENGTH,
    SEED,
    SHARE,
    SHARE_BELOW_1,
    Range,
    check_address,
    check_path,
    check_range,
    check_ranges,
    check_unused,
    duration_s,
    ranged,
    whole,
)

Fp8 = Literal["tensorwise", "blockwise", "mxfp8", "nvfp4"]
"""Scaling of quantised matrix products, see `dit.kernels.fp8`."""


Algorithm = Literal["adamw", "muon"]


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW, or Muon with AdamW.

    Attributes:
        algorithm: `muon` updates the 2-D weights of blocks, except modulations and routers; AdamW the others.
        lr: peak learning rate; Muon's updates have about the size of AdamW's.
        beta1, beta2: decay of the mean of the gradient, and of its square.
        eps: added to the divisor.
        weight_decay: decoupled; not of one-dimensional parameters (biases, norms).
        clip_grad: largest global gradient norm; 0 disables clipping.
        muon_momentum: decay of Muon's momentum.
        offload: store the moments in host memory: 8 bytes per parameter (Muon: 4).
    """

    algorithm: Algorithm = "adamw"
    lr: float = ranged(1e-4, NOT_NEGATIVE)
    beta1: float = ranged(0.9, SHARE_BELOW_1)
    beta2: float = ranged(0.999, SHARE_BELOW_1)
    eps: float = ranged(1e-8, POSITIVE)  # with 0, a weight without gradient would be updated by 0 / 0
    weight_decay: float = ranged(0.0, NOT_NEGATIVE)
    clip_grad: float = ranged(1.0, NOT_NEGATIVE)
    muon_momentum: float = ranged(0.95, SHARE_BELOW_1)
    offload: bool = False

    def validate(self) -> None:
        """Check every field by itself."""
        check_ranges("optimizer", self)
        if self.algorithm != "muon":
            where = f"with optimizer.algorithm={self.algorithm}"
            check_unused("optimizer", self, ["muon_momentum"], where, "set optimizer.algorithm=muon")


HANG_TIMEOUT_S = Range(3, 3 * 86_400)


@dataclass(kw_only=True)
class TrainingConfig:
    """Length, batch, precision, seed and intervals of a run.

    Attributes:
        run_dir: folder of the run.
        num_steps: optimizer steps, including those before a resume.
        micro_batch_size, global_batch_size: samples (or packs) per forward pass of a rank, and per step over all ranks.
        precision: `bf16` and `fp16` have fp32 master weights and gradients.
        fp8: 8-bit matrix products in transformer blocks, with a scale per matrix (`tensorwise`), 128 (`blockwise`) or
            32 numbers (`mxfp8`), or experimental 4-bit ones (`nvfp4`: per 16).
        loss_scale: fp16 only: constant factor of the loss; None for a dynamic factor.
        initial_loss_scale, loss_scale_window: fp16 only: first dynamic factor, and steps without overflow until it
            doubles; an overflow skips the update and halves it.
        attention: `auto`: a kernel that has passed `megatron-dit kernels --verify`, else torch's varlen kernel (bf16 on
            CUDA) or scaled-dot-product attention.
        linears: parallel linears; `auto`: Megatron-Core's; `overlapped`: communication of sequence parallelism during
            products.
        kernels: memory-bound operations and the optimizer's update; `compile`: torch.compile of the layers (not under
            FSDP); `auto`: `triton` if `kernels --verify` has passed, else `eager`.
        cuda_graph: replay steps as CUDA graphs; needs batches of one shape, or packs.
        deterministic: use slower kernels with bit-identical results.
        recompute: activations to recompute: none, cheap ones (norms, activation functions), or all.
        recompute_layers: first layers of each pipeline stage to recompute; None for all.
        seed: of initial weights, data order and all noise.
        ema_decay, ema_start_step: decay of the weight average, and the step at which it starts.
        ema_offload: store the averages in host memory.
        ema_sigma_rel: lengths of power-function averages (0.01 to 0.28), such as [0.05, 0.1].
        log_interval: steps between log lines.
        validation_interval, sample_interval: steps between held-out losses, and between sample grids; 0 for never.
            Grids have the largest size that at least 1 of 16 samples reaches.
        hooks: user classes, `['package.module.Class']`, called after every step and validation.
        stop_at_step: stop after this step with a checkpoint and code 75; a later step or None continues.
        on_bad_numbers: after a non-finite number or spike, end the run, omit the update, or return to the last
            checkpoint without the data since.
        spike_threshold: robust standard deviations above the median that are a spike, such as 20.
        max_bad_steps: bad steps allowed within 100 steps.
        recheck_interval: interval of steps that are computed twice to detect faulty hardware; needs `deterministic`.
        time_limit: time as for Slurm's `--time` (`03:55:00`), before which the run saves and exits with 75.
        hang_timeout_s: seconds without progress until a rank ends the run.
    """

    run_dir: str = "runs/default"
    num_steps: int = ranged(1000, COUNT)
    micro_batch_size: int = ranged(1, whole(1, 2**20))
    global_batch_size: int = ranged(1, whole(1, 2**24))
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    fp8: Optional[Fp8] = None
    loss_scale: Optional[float] = ranged(None, LOSS_SCALE)
    initial_loss_scale: float = ranged(2.0**16, LOSS_SCALE)
    loss_scale_window: int = ranged(1000, COUNT)
    attention: Literal["auto", "sdpa", "varlen", "flash_attn", "flash_attn_3", "flash_attn_4", "transformer_engine"] = (
        "auto"
    )
    linears: Literal["auto", "megatron", "overlapped", "transformer_engine"] = "auto"
    kernels: Literal["auto", "triton", "compile", "eager"] = "auto"
    cuda_graph: bool = False
    deterministic: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: Optional[int] = ranged(None, COUNT)
    seed: int = ranged(1234, SEED)
    ema_decay: Optional[float] = ranged(0.9999, SHARE_BELOW_1)
    ema_start_step: int = ranged(0, COUNT_OR_ZERO)
    ema_offload: bool = False
    ema_sigma_rel: Optional[list[float]] = ranged(None, RELATIVE_LENGTH)
    log_interval: int = ranged(10, COUNT)
    validation_interval: int = ranged(0, COUNT_OR_ZERO)
    sample_interval: int = ranged(0, COUNT_OR_ZERO)
    hooks: Optional[list[str]] = None
    stop_at_step: Optional[int] = ranged(None, COUNT)
    on_bad_numbers: Literal["stop", "skip", "rewind"] = "stop"
    spike_threshold: Optional[float] = ranged(None, POSITIVE)
    max_bad_steps: int = ranged(3, COUNT)
    recheck_interval: int = ranged(0, COUNT_OR_ZERO)
    time_limit: Optional[str] = None
    hang_timeout_s: Optional[float] = ranged(900.0, HANG_TIMEOUT_S)

    def check_time_out(self) -> None:
        """Check the setting that process groups need, before all others."""
        check_range("training.hang_timeout_s", self.hang_timeout_s, HANG_TIMEOUT_S)

    @property
    def collective_timeout_s(self) -> float:
        """Time limit of a collective in seconds: twice `hang_timeout_s`, so that the heartbeat reports a hang first."""
        return 2 * (self.hang_timeout_s or 900.0)

    def validate(self) -> None:
        """Check every field by itself."""
        check_path("training.run_dir", self.run_dir)
        if self.time_limit is not None:
            duration_s("training.time_limit", self.time_limit)
        check_ranges("training", self)
        if self.fp8 is not None and self.precision == "fp16":
            raise ConfigError(
                f"training.fp8={self.fp8} needs training.precision=bf16 or fp32, got fp16; set "
                "training.precision=bf16, or training.fp8=None"
            )
        self._check_deterministic()
        self._check_unused()

    @property
    def num_averages(self) -> int:
        """Number of weight averages."""
        return 0 if self.ema_decay is None else 1 + len(self.ema_sigma_rel or ())

    def _check_unused(self) -> None:
        """Raise an error for settings that have no effect because of other settings."""
        unused, dynamic = partial(check_unused, "training", self), ["initial_loss_scale", "loss_scale_window"]
        if self.recompute == "none":
            unused(["recompute_layers"], "with training.recompute=none", "set it to selective or full")
        if self.ema_decay is None:
            averages = ["ema_start_step", "ema_offload", "ema_sigma_rel"]
            unused(averages, "with training.ema_decay=None", "set training.ema_decay")
        if self.on_bad_numbers == "stop":
            where = "with training.on_bad_numbers=stop, which ends the run at the first bad step"
            unused(["max_bad_steps"], where, "set training.on_bad_numbers=skip or rewind")
        if self.precision != "fp16":
            where = f"with training.precision={self.precision}"
            unused(["loss_scale", *dynamic], where, "set training.precision=fp16")
        if self.loss_scale is not None:
            where = f"with the constant training.loss_scale={self.loss_scale}"
            unused(dynamic, where, "set training.loss_scale=None")

    def _check_deterministic(self) -> None:
        """Raise an error for kernels that have not been verified to be deterministic."""
        unchecked = {
            "attention": (self.attention == "transformer_engine", "attention=auto"),
            "linears": (self.linears in ("overlapped", "transformer_engine"), "linears=megatron"),
            "kernels": (self.kernels == "compile", "kernels=eager or triton"),
        }
        for name, (is_requested, cure) in unchecked.items():
            if self.deterministic and is_requested:
                raise ConfigError(
                    f"training.deterministic=True does not work with training.{name}={getattr(self, name)}, which "
                    f"selects kernels by itself; use training.{cure}, or training.deterministic=False"
                )
        if self.recheck_interval and not self.deterministic:
            raise ConfigError(
                f"training.recheck_interval={self.recheck_interval} compares two computations of a step to the bit, "
                "and they may differ with training.deterministic=False; set training.deterministic=True, or "
                "training.recheck_interval=0"
            )


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoints.

    Attributes:
        interval: steps between checkpoints; 0 saves only at the end.
        keep_last, keep_every, keep_best: retained checkpoints: the newest (at least 1), multiples of `keep_every`
            steps, and the lowest held-out losses.
        async_save: write in another process, after a copy to host memory.
        save_timeout_s: seconds until an asynchronous save or a copy fails.
        copy_to: address of copies (`s3://bucket/folder`), from which a run also resumes.
        resume: from the newest valid checkpoint, if any; `must` fails without one, `never` with one.
        resume_from: run folder or checkpoint whose full state a new run continues. A run with checkpoints ignores it.
        start_from: weights of a new run: a run folder or checkpoint (its average, if any), a folder of diffusers, or
            `hf://owner/name`. A run with checkpoints reads only the frozen weights under `model.lora` from it.
        accept_changes: settings or parts that may differ from the checkpoint or `start_from`. `data.path` and
            `data.blend` accept changed data, too, read from the beginning; `checkpoint.start_from` data of other
            encoders.
    """

    interval: int = ranged(1000, COUNT_OR_ZERO)
    keep_last: int = ranged(2, COUNT)
    keep_every: int = ranged(0, COUNT_OR_ZERO)
    keep_best: int = ranged(0, COUNT_OR_ZERO)
    async_save: bool = False
    save_timeout_s: float = ranged(1800.0, POSITIVE)
    copy_to: Optional[str] = None
    resume: Literal["auto", "never", "must"] = "auto"
    resume_from: Optional[str] = None
    start_from: Optional[str] = None
    accept_changes: Optional[list[str]] = None

    def validate(self) -> None:
        """Check every field by itself."""
        if self.copy_to is not None:
            check_address("checkpoint.copy_to", self.copy_to)
        for name in ("start_from", "resume_from"):
            if getattr(self, name) is not None:
                check_path(f"checkpoint.{name}", getattr(self, name))
        if self.resume_from is not None and self.resume == "never":
            raise ConfigError(
                f"checkpoint.resume_from={self.resume_from} continues a run, but checkpoint.resume=never starts a new "
                "one; remove one of the two"
            )
        check_ranges("checkpoint", self)

    @property
    def save_limit(self) -> str:
        """Text of error messages about saves that take too long."""
        return f"within checkpoint.save_timeout_s={self.save_timeout_s:g} s"


@dataclass(kw_only=True)
class LoggingConfig:
    """Outputs of scalars and pictures, in addition to the console and `metrics.jsonl`.

    Attributes:
        tensorboard: write `events/` in the run folder.
        wandb: mirror to Weights & Biases; None: if there is a key and the package.
        wandb_project, wandb_name, wandb_group: of the run; None for wandb's defaults.
        wandb_artifacts: upload checkpoints, while training waits.
        profile_steps: first and last step of rank 0's trace in `profile/`.
    """

    tensorboard: bool = True
    wandb: Optional[bool] = None
    wandb_project: str = "megatron-dit"
    wandb_name: Optional[str] = None
    wandb_group: Optional[str] = None
    wandb_artifacts: bool = False
    profile_steps: Optional[list[int]] = ranged(None, COUNT)

    def validate(self) -> None:
        """Check the steps to trace."""
        check_ranges("logging", self)
        steps = self.profile_steps
        if steps is not None and (len(steps) != 2 or steps[0] > steps[1]):
            raise ConfigError(
                f"logging.profile_steps={steps} must be the first and the last step to trace, such as [10, 11], or None"
            )


@dataclass(kw_only=True)
class SamplingConfig:
    """Sample grids during training, and the defaults of the sample command.

    Attributes:
        solver: integrator of the sampling ODE or SDE.
        num_steps: solver steps.
        variance: noise variance of `ancestral`: of the posterior, of the forward step, or learned.
        guidance_scale: classifier-free guidance x0 = uncond + scale * (cond - uncond); 1 for none.
        guidance_channels: guide only this many channels (3 of 4 in facebookresearch/DiT).
        guidance_rescale: share of rescaled prediction (arXiv:2305.08891: 0.7).
        guidance_norm: give guided predictions the norm of the conditional ones, per token (Qwen-Image).
        guidance_interval: smallest and largest sigma / alpha with guidance (arXiv:2404.07724).
        churn: `[s_churn, s_tmin, s_tmax, s_noise]` of EDM's stochastic `heun` (arXiv:2206.00364, Algorithm 2).
        thresholding: clamp estimated clean pixels to [-1, 1], or divide them by their 99.5 % quantile above 1
            (`dynamic`, Imagen).
        samples_per_class: rows of the grid.
        raw_weights: also draw a grid with the raw weights.
        prompts: texts instead of classes.
        vae: autoencoder of latents (folder or hub name); None for that of the data.
        seed: of the initial noise.
    """

    solver: Literal["euler", "heun", "ddim", "ancestral", "dpmpp_2m"] = "euler"
    num_steps: int = ranged(30, whole(1, 10_000))
    variance: Literal["small", "large", "learned"] = "small"
    guidance_scale: float = ranged(2.0, FINITE)
    guidance_channels: Optional[int] = ranged(None, COUNT)
    guidance_rescale: float = ranged(0.0, SHARE)
    guidance_norm: bool = False
    guidance_interval: Optional[list[float]] = ranged(None, NOT_NEGATIVE)
    churn: Optional[list[float]] = ranged(None, NOT_NEGATIVE)
    thresholding: Literal["none", "static", "dynamic"] = "none"
    samples_per_class: int = ranged(1, COUNT)
    raw_weights: bool = False
    prompts: Optional[list[str]] = None
    vae: Optional[str] = None
    seed: int = ranged(7, SEED)

    def validate(self, *, guided: bool = False) -> None:
        """Check every field by itself.

        Args:
            guided: whether a second model has guidance of its own.
        """
        check_ranges("sampling", self)
        interval = self.guidance_interval
        if interval is not None and (len(interval) != 2 or not interval[0] < interval[1]):
            raise ConfigError(
                f"sampling.guidance_interval={interval} must be two noise levels, low and high, such as [0.2,5]"
            )
        if self.churn is not None and (len(self.churn) != 4 or not self.churn[0] > 0):
            raise ConfigError(
                f"sampling.churn={self.churn} must be four numbers, [s_churn, s_tmin, s_tmax, s_noise], the first "
                "above 0, such as [40,0.05,50,1.003]; or none"
            )
        for names, where, cure in self.without_effect(guided=guided):
            check_unused("sampling", self, names, where, cure)

    def without_effect(self, *, guided: bool = False) -> list[tuple[list[str], str, str]]:
        """Return groups of fields without effect: the fields, the reason, and the change that gives them an effect."""
        groups = []
        if self.guidance_scale == 1 and not guided:
            names = ["guidance_rescale", "guidance_norm", "guidance_interval"]
            groups.append((names, "with sampling.guidance_scale=1", "set another scale"))
        if self.solver != "heun":
            groups.append((["churn"], f"with sampling.solver={self.solver}", "use sampling.solver=heun"))
        return groups
