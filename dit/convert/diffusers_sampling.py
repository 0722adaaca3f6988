"""Sampling of exported weights with diffusers: scheduler settings, and a README page.

The page documents facts that scheduler settings do not have: the direction of time, and the class index of "no class".
For class-conditional models it has a loop that generates the same samples as our sampler (tests run it); `steps_notes`
has the exceptions.
"""

import math
from typing import Any, Optional

from dit.convert.diffusers_format import VERSION, TrainedModel
from dit.errors import ConfigError
from dit.objectives.base import Objective
from dit.objectives.ddpm import DDPM, MAX_LOG_SNR
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.noise_levels import REFERENCE_STEPS, TableSchedule, beta_ends

SCHEDULER_CONFIG = "scheduler_config.json"
PAGE = "README.md"
PREDICTIONS = {"noise": "epsilon", "x0": "sample", "v": "v_prediction"}
SHIFT_BY_TOKENS = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
"""Settings of `FlowMatching.shift_by_tokens` in diffusers."""
BETA_SCHEDULES = {"linear": "linear", "scaled_linear": "scaled_linear", "cosine": "squaredcos_cap_v2"}


def scheduler_config(objective: Objective, num_steps: Optional[int] = None) -> Optional[dict[str, Any]]:
    """Return the `scheduler_config.json` for an objective; None if diffusers has no such scheduler.

    Args:
        num_steps: of sampling; one step has no last time, to which the scheduler cannot stretch it.

    Source: diffusers 0.38, `schedulers/`; trailing steps that end at the clean latent, Lin et al. 2023,
    arXiv:2305.08891.
    """
    if isinstance(objective, FlowMatching):
        settings: dict[str, Any] = {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": REFERENCE_STEPS,
            "shift": objective.time_shift,
            "shift_terminal": None if num_steps == 1 else objective.last_time,
        }
        if objective.shift_by_tokens is not None:
            settings |= {"use_dynamic_shifting": True, **dict(zip(SHIFT_BY_TOKENS, objective.shift_by_tokens))}
    elif isinstance(objective, EDM):
        names = ("sigma_min", "sigma_max", "sigma_data", "rho")
        settings = {"_class_name": "EDMEulerScheduler", **{name: getattr(objective, name) for name in names}}
    elif isinstance(objective, DDPM) and objective.discrete_steps is not None and objective.network_time == "time":
        settings = {
            "_class_name": "DDIMScheduler",
            "num_train_timesteps": objective.discrete_steps,
            "beta_schedule": BETA_SCHEDULES[objective.schedule],
            "prediction_type": PREDICTIONS[objective.prediction],
            "timestep_spacing": "trailing",
            "steps_offset": 1,  # no effect; StableDiffusionPipeline warns about other values
            "set_alpha_to_one": True,
            "clip_sample": False,
            "rescale_betas_zero_snr": objective.zero_terminal_snr,
        }
        if objective.schedule != "cosine":
            ends = beta_ends(objective.schedule, objective.betas)
            scaled = (beta * REFERENCE_STEPS / objective.discrete_steps for beta in ends)
            settings |= dict(zip(("beta_start", "beta_end"), scaled))
    else:
        return None
    return {"_diffusers_version": VERSION, **settings}


def num_steps_of(trained: TrainedModel) -> int:
    """Return the number of steps of the run's own sampling."""
    return int(trained.sampling.get("num_steps", 50))


def steps_notes(trained: TrainedModel) -> list[str]:
    """Return a note on the steps of `DDIMScheduler`, which are ours only if their number divides the table's.

    In n steps of a table of N, it goes from step k to the noise of step k - N // n, and predicts at other steps next.
    """
    objective = trained.objective
    if not isinstance(objective, DDPM) or scheduler_config(objective) is None:
        return []
    schedule = objective.noise_schedule
    assert isinstance(schedule, TableSchedule)
    total, num_steps = schedule.num_steps, num_steps_of(trained)
    first = int(schedule.step(schedule.time(objective.sampling_grid(1)[0])))
    if first < total - 1:
        return [
            f"the scheduler starts at step {total - 1}, launch.sample at step {first}, because later ones have almost "
            "no signal; the samples differ"
        ]
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    if num_steps in divisors:
        which = f", as {num_steps} does"
    else:
        nearest = [*[n for n in divisors if n < num_steps][-1:], *[n for n in divisors if n > num_steps][:1]]
        which = f"; the nearest to {num_steps} that do are {' and '.join(map(str, nearest))}"
    return [f"the scheduler takes the steps of launch.sample if their number divides {total}{which}"]


def spaced_scheduler(objective: FlowMatching, num_steps: int) -> dict[str, Any]:
    """Return the `scheduler_config.json` with which a pipeline that states no noise levels takes our steps.

    The scheduler spaces n times evenly from 1 to s / (N + s - 1), shifts them by its `shift` s, and stretches them so
    that they end at `shift_terminal`. Step j of n has, up to a factor,

        ours, of shift t    1 - sigma = j / (1 - j (t - 1) / (n t))
        theirs              1 - sigma = j / (1 - j a (s - 1) / s)     a = (N - 1) / ((n - 1) (N + s - 1))

    These are equal if s solves a quadratic equation, and the factor if `shift_terminal` is our last level.
    """
    config = scheduler_config(objective, num_steps)
    assert config is not None
    if num_steps == 1:
        return {**config, "shift": 1.0}
    shift, steps = objective.time_shift, REFERENCE_STEPS - 1
    c = (shift - 1) * (num_steps - 1) / (num_steps * shift)
    b = steps * (1 - c)
    if b**2 < 4 * c * steps:
        raise ConfigError(
            f"objective.time_shift={shift:g} is too large for the scheduler of diffusers in {num_steps} steps; export "
            "the model with --format diffusers"
        )
    last = objective.last_time or shift / (num_steps + shift - 1)
    return {**config, "shift": 2 * steps / (b + math.sqrt(b**2 - 4 * c * steps)), "shift_terminal": last}


def how_to_sample(trained: TrainedModel) -> list[str]:
    """Return lines about inputs and outputs of the network: noising path, time, sign, index of "no class"."""
    objective, model = trained.objective, trained.model
    lines = [f"trained with {objective}"]
    if objective.reconstructs:
        latents = (
            "z * scaling_factor, z = `VQModel.from_pretrained(folder).encode(x).latents`, which `decode` quantises"
            if objective.quantizes
            else "(z - shift_factor) * scaling_factor, z the mean of "
            "`AutoencoderKL.from_pretrained(folder).encode(x).latent_dist`"
        )
        return [
            *lines,
            f"pictures of {model.in_channels} channels in [-1, 1], sides in multiples of {model.patch_spatial} "
            f"(trained on {trained.latent_size[1]} x {trained.latent_size[2]})",
            f"latents for a diffusion model are {latents}; `--vae folder` of `python -m energon_data.prepare` writes "
            "these",
        ]
    if isinstance(objective, FlowMatching):
        predicts = "the clean latent x0" if objective.prediction == "x0" else "the velocity noise - x0"
        # Classes with reversed time have a negated head.
        time, sign = ("1 - t", "minus ") if getattr(model, "reversed_time", False) else ("1000 t", "")
        shift = f"{objective.time_shift:g}"
        if objective.shift_by_tokens is not None:
            low, high, fewest, most = objective.shift_by_tokens
            shift = f"s of log(s) = {low:g} at {fewest:g} tokens and {high:g} at {most:g}, linear in the tokens"
        lines += [
            "x_t = (1 - t) x0 + t noise: t = 0 is data, t = 1 is noise; sampling goes from 1 to 0",
            f"the network gets {time} as its timestep and predicts {sign}{predicts}",
            f"times are evenly spaced, then shifted by {shift}: t s / (1 + (s - 1) t)",
        ]
        if objective.last_time is not None:
            lines.append(f"two or more times are then stretched to end at {objective.last_time:g} before the last step")
    elif isinstance(objective, EDM):
        lines += [
            "x = x0 + sigma noise; sampling goes from sigma_max to sigma_min, then to 0",
            "the network gets c_in x and the timestep 1000 log(sigma) / 4, and predicts (x0 - c_skip x) / c_out",
        ]
    elif isinstance(objective, DDPM):
        targets = {"noise": "the noise", "x0": "the clean latent x0", "v": "v = alpha noise - sigma x0"}
        steps = objective.discrete_steps
        time = (
            f"1000 ln(alpha**2 / sigma**2), the logarithm between {-MAX_LOG_SNR:g} and {MAX_LOG_SNR:g}"
            if objective.network_time == "log_snr"
            else "1000 t, t from 0 (data) to 1 (noise)"
            if steps is None
            else f"{'k' if steps == 1000 else f'1000 k / {steps}'} for step k, 0 the cleanest"
        )
        lines += [
            f"x_t = alpha x0 + sigma noise, alpha**2 + sigma**2 = 1, {objective.schedule} schedule"
            + (", rescaled so that the last step is pure noise" if objective.zero_terminal_snr else ""),
            f"the network gets {time}, as its timestep and predicts {targets[objective.prediction]}",
        ]
        if scheduler_config(objective) is None:
            kind = "continuous" if steps is None else "the logarithm of a ratio"
            lines.append(f"time is {kind}; diffusers has no scheduler for it, see dit/objectives/noise_levels.py")
    out, channels = getattr(model, "out_channels", None), model.in_channels
    if out not in (None, channels):
        lines.append(f"only the first {channels} of the {out} predicted channels are the mean")
    if (label := model.condition("label")) and label.num_classes is not None:
        lines.append(f"classes are 0 to {label.num_classes - 1}; {label.num_classes} means no class, for guidance")
    if trained.reference_aspect not in (None, "keep"):
        lines.append(f"references were cropped as by `prepare --aspect {trained.reference_aspect}`")
    lines.append(
        f"latents of {' x '.join(map(str, trained.latent_size))} (frames x height x width), {channels} channels"
    )
    return lines


def page(
    trained: TrainedModel,
    class_name: str,
    *,
    notes: list[str],
    folder: str = ".",
    code: Optional[str] = None,
) -> str:
    """Return the README page of exported weights, in Markdown.

    Args:
        folder: of the transformer, relative to the page.
    """
    lines = [f"# {class_name}, exported by megatron-dit", "", *(f"* {line}" for line in how_to_sample(trained))]
    lines += [f"* {note}" for note in notes]
    if trained.class_names is not None:
        lines += ["", "Classes: " + ", ".join(f"{i} {name}" for i, name in enumerate(trained.class_names))]
    if code is not None:
        lines += ["", "To sample with diffusers:", "", "```python", code, "```", ""]
    where = f"`{folder}/config.json` (`_megatron_dit`)" if folder != "." else "`config.json` (`_megatron_dit`)"
    lines += ["", f"`megatron-dit import` imports the weights and all of the above, which it reads from {where}."]
    return "\n".join(lines) + "\n"


def loop(trained: TrainedModel, scheduler_class: str) -> str:
    """Return a Python function that samples a class-conditional transformer with diffusers' scheduler."""
    objective, label = trained.objective, trained.model.condition("label")
    assert label is not None
    start, steps, inputs, time, velocity = "noise", "num_steps", "x", "t", []
    if isinstance(objective, FlowMatching):
        steps = "sigmas=[1 - i / num_steps for i in range(num_steps)]"
        if objective.prediction == "x0":
            velocity = ["out = (x - out) / (t / 1000)  # x0 to velocity"]
    elif isinstance(objective, EDM):
        start, inputs, time = f"{objective.sigma_max!r} * noise", "scheduler.scale_model_input(x, t)", "1000 * t"
    elif isinstance(objective, DDPM) and objective.discrete_steps != REFERENCE_STEPS:
        time = f"t * {REFERENCE_STEPS} / {objective.discrete_steps}"
    body = "\n".join(f"        {line}" for line in velocity)
    return f"""\
import torch
from diffusers import DiTTransformer2DModel, {scheduler_class}


@torch.no_grad()
def sample(transformer_folder, scheduler_folder, labels, num_steps, guidance_scale, noise=None):
    transformer = DiTTransformer2DModel.from_pretrained(transformer_folder).eval()
    scheduler = {scheduler_class}.from_pretrained(scheduler_folder)
    scheduler.set_timesteps({steps})
    channels, size = transformer.config.in_channels, transformer.config.sample_size
    if noise is None:
        noise = torch.randn(len(labels), channels, size, size)
    labels = torch.tensor(labels)
    labels = torch.cat([labels, torch.full_like(labels, {label.num_classes})])  # no class
    x = {start}
    for t in scheduler.timesteps:
        both = torch.cat([{inputs}] * 2)
        time = ({time}).expand(len(both))
        out = transformer(both, timestep=time, class_labels=labels).sample[:, :channels]
        with_class, without = out.chunk(2)
        out = without + guidance_scale * (with_class - without)
{body + chr(10) if body else ""}        x = scheduler.step(out, t, x).prev_sample
    return x"""
