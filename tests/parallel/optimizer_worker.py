"""Training steps from the formulas, in plain torch: the reference for Megatron-Core's optimizers and wrappers."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from dit.backends import process_groups
from dit.models.dit.config import DiTConfig
from dit.optimizer.schedules import TorchOneCycle
from dit.parallel.build import build_model
from dit.settings import OptimizerConfig
from dit.step.forward_step import training_forward_step
from tests.parallel.fsdp_worker import config_of


def rates(num_steps: int, peak: float, schedule: TorchOneCycle) -> list[tuple[float, float]]:
    """Return the learning rate and beta1 of every update, from torch's `OneCycleLR` and AdamW."""
    group = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=peak)
    shape = {name: getattr(schedule, name) for name in ("pct_start", "div_factor", "final_div_factor")}
    reference = torch.optim.lr_scheduler.OneCycleLR(group, peak, total_steps=num_steps, **shape)
    found = []
    for _ in range(num_steps):
        found.append((group.param_groups[0]["lr"], group.param_groups[0]["betas"][0]))
        group.step()
        if len(found) < num_steps:
            reference.step()
    return found


def clipped(gradients: dict[str, Tensor], limit: float) -> tuple[dict[str, Tensor], float]:
    """Scale all gradients so that their joint norm is at most `limit`; return the norm before scaling."""
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    return {name: g * min(1.0, limit / norm) for name, g in gradients.items()}, norm


def adamw(
    weight: Tensor, m: Tensor, v: Tensor, gradient: Tensor, n: int, lr: float, beta1: float, s: OptimizerConfig
) -> None:
    """Make update `n` of one parameter, in place; beta1 may change from update to update, as in torch.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101, Algorithm 2; no decay of one-dimensional parameters.
    """
    m.copy_(beta1 * m + (1 - beta1) * gradient)
    v.copy_(s.beta2 * v + (1 - s.beta2) * gradient.square())
    decay = s.weight_decay if weight.dim() > 1 else 0.0
    direction = (m / (1 - beta1**n)) / ((v / (1 - s.beta2**n)).sqrt() + s.eps)
    weight.copy_(weight - lr * (direction + decay * weight))


def width_factor(name: str, weight: Tensor, model: DiTConfig) -> float:
    """Return the factor of the learning rate of a parameter with `base_width`.

    Source: Yang et al. 2022, arXiv:2203.03466, table 3: 1 / width for matrices whose fan-in grows.
    """
    is_input = name in ("embed.weight", "conditioner.time.linear_1.weight", "conditioner.label.weight")
    return 1.0 if model.base_width is None or weight.dim() == 1 or is_input else model.base_width / model.hidden_size


def power_average(history: list[dict[str, Tensor]], sigma_rel: float) -> dict[str, Tensor]:
    """Average the weights after each update, weighted by its share of the integral of the power function.

    Source: Karras et al. 2024, arXiv:2312.02696, Eq. 4 and the cubic equation of appendix C for gamma.
    """
    inverse = sigma_rel**-2
    gamma = np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max()
    ends = [(step / len(history)) ** (gamma + 1) for step in range(len(history) + 1)]
    shares = [end - start for start, end in pairwise(ends)]
    return {name: sum(share * w[name] for share, w in zip(shares, history)) for name in history[0]}


def formulas(case: dict) -> dict:
    """Train the unwrapped model of `case` on one rank, without the project's optimizer and average."""
    config = config_of(case)
    _, spec = config.check_here()
    training, optimizer = config.training, config.optimizer
    groups = process_groups.initialize(config.parallel)
    (network,) = build_model(config.model, config.parallel, training, groups)
    parameters = dict(network.named_parameters())
    weights = {name: p.detach().float().clone() for name, p in parameters.items()}
    average, zeros = dict(weights), {name: torch.zeros_like(w) for name, w in weights.items()}
    m, v = ({name: z.clone() for name, z in zeros.items()} for _ in range(2))
    stream = config.data.build_train(spec, dp_rank=0, dp_size=1, seed=training.seed, log_dir=None)
    norms, history = [], []
    for n in range(1, training.num_steps + 1):
        forward_step = training_forward_step(config.objective, config.model, training.seed, n - 1)
        gradients, tokens = {name: z.clone() for name, z in zeros.items()}, 0
        for _ in range(training.global_batch_size):
            prediction_TC, loss_function = forward_step(stream, network)
            loss_sum, count, _ = loss_function(prediction_TC)
            loss_sum.backward()
            tokens += int(count)
            for name, parameter in parameters.items():  # in fp32, whatever the precision of the weights
                if parameter.grad is not None:
                    gradients[name] += parameter.grad.float()
                    parameter.grad = None
        gradients, norm = clipped({name: g / tokens for name, g in gradients.items()}, optimizer.clip_grad)
        norms.append(norm)
        peak, beta1 = rates(training.num_steps, optimizer.lr, config.schedule)[n - 1]
        with torch.no_grad():
            for name, parameter in parameters.items():
                factor = width_factor(name, parameter, config.model)
                of_weight = replace(optimizer, weight_decay=optimizer.weight_decay / factor)
                adamw(weights[name], m[name], v[name], gradients[name], n, factor * peak, beta1, of_weight)
                parameter.copy_(weights[name])
        d = 0.0 if n <= training.ema_start_step else training.ema_decay
        history.append({name: w.clone() for name, w in weights.items()})
        average = {name: d * average[name] + (1 - d) * weights[name] for name in weights}
    process_groups.release()
    slots = {"weight": weights, "ema": average, "exp_avg": m, "exp_avg_sq": v}
    for sigma_rel in training.ema_sigma_rel or ():
        slots[f"ema_power_{sigma_rel}"] = power_average(history, sigma_rel)
    state = {f"{slot}.{name}": value for slot, named in slots.items() for name, value in named.items()}
    return {"grad_norms": norms, "after": {**state, "step": torch.tensor(training.num_steps)}}
