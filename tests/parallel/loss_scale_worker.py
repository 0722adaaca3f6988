"""Functions that test cases run on each rank of an fp16 world."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dit.backends import process_groups
from dit.errors import NotFiniteError
from dit.optimizer.step_numbers import StepNumbers
from dit.training.pretrain import Run
from tests.parallel.fsdp_worker import start, state_of


class Overflowing:
    """Multiplies the gradient (or the output) of the model's first layer in the given steps on one rank.

    Args:
        steps: step numbers, from 1.
        rank: the rank that multiplies.
        factor: multiplies the gradient of the layer's output.
        forward: multiply the layer's output instead, so that the loss is not finite.
    """

    def __init__(self, steps: list[int], rank: int = 0, factor: float = torch.inf, forward: bool = False) -> None:
        self.steps, self.rank, self.factor, self.forward = steps, rank, factor, forward
        self.now = 0

    def install(self, run: Run) -> None:
        layer = next(run.state.chunks[0].units())
        layer.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: object, out: Tensor) -> Tensor | None:
        if self.now not in self.steps or dist.get_rank() != self.rank:
            return None
        if self.forward:
            return out * self.factor
        out.register_hook(lambda grad: grad * self.factor)
        return None


def train(case: dict) -> dict:
    """Resume, train `case["steps"]` steps, save if requested; return norm, scale and skips per step, and the state."""
    run = start(case)
    fault = Overflowing(**case.get("fault", {"steps": []}))
    fault.install(run)
    scale = run.state.loss_scale
    found: dict = {"resumed_at": run.state.step, "scales": [], "skips": [], "norms": [], "error": None}
    found["before"] = state_of(run)
    loss_sums = torch.zeros(2)
    for _ in range(case["steps"]):
        fault.now = run.state.step + 1
        found["scales"].append(scale.value)
        try:
            found["norms"].append(run.step(loss_sums))
        except NotFiniteError as error:
            found["error"] = str(error)
            break
        found["skips"].append(scale.overflowed_steps)
    found |= {"last_scale": scale.value, "step": run.state.step, "after": state_of(run)}
    if case.get("save"):
        run.save()
    run.close()
    process_groups.release()
    return found


def overflow_on_rank_1(case: dict) -> dict:
    """Record an overflow on rank 1 only; return the result of rank 0."""
    run = start(case)
    scale = run.state.loss_scale
    scale.found_inf.fill_(dist.get_rank() == 1)
    numbers = StepNumbers(run.state.optimizer, run.state.groups, torch.ones(2), 1).host
    is_good = numbers.is_good
    result = {"overflowed": numbers.overflowed, "is_good": is_good, "ratio": numbers.loss_scale / scale.value}
    run.close()
    process_groups.release()
    return result
