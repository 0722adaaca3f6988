"""In a dry run and in training, work on the host grows linearly with the number of parameters."""

import sys

import pytest
from torch import nn

from benchmarks.parallel_training import tiny_model
from dit.objectives import addressed_noise
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.update import Update
from dit.parallel.dims import ParallelConfig
from dit.planner.job import Job
from dit.planner.trace import FEW_NUMBERS, trace_here
from dit.settings import OptimizerConfig, TrainingConfig
from dit.tracing.packs import PackShape
from tests.support import ranks

EXPERTS = (4, 8, 12)
SIDES = (64, 80)
PACK = PackShape(((1, 4, 8),), text_lengths=(4,))


def count(experts: int) -> dict[str, int]:
    """Trace a model of two layers of experts under FSDP; run this in a separate process.

    Returns:
        Modules visited by walks over the model, and the Python calls of the last update.
    """
    found = {"walks": 0, "updates": 0}
    walk, update = nn.Module.named_modules, Update.__call__

    def walked(*args, **kwargs):
        for module in walk(*args, **kwargs):
            found["walks"] += 1
            yield module

    def called(frame, event, argument):
        found["updates"] += event == "call"

    def updated(*args):
        found["updates"] = 0  # the first update in a process fills caches
        sys.setprofile(called)
        update(*args)
        sys.setprofile(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIT_DEVICE", "cpu")
        patch.setattr(nn.Module, "named_modules", walked)
        patch.setattr(Update, "__call__", updated)
        model, parallel = tiny_model(num_layers=2, num_experts=experts), ParallelConfig(data_parallel="fsdp")
        settings = FlowMatching(), OptimizerConfig(), parallel, TrainingConfig(precision="fp32")
        trace_here(Job(model, *settings, PACK, world_size=2))
    return found


def real_random_numbers() -> list[int]:
    """Trace a step on a large picture; return the numbers of random numbers with and without values."""
    most, to_normal = [0, 0], addressed_noise.to_normal

    def noted(words):
        fake = words[0].is_meta
        most[fake] = max(most[fake], words[0].numel())
        return to_normal(words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIT_DEVICE", "cpu")
        patch.setattr(addressed_noise, "to_normal", noted)
        settings = FlowMatching(), OptimizerConfig(), ParallelConfig(), TrainingConfig(precision="fp32")
        trace_here(Job(tiny_model(num_layers=1), *settings, PackShape(((1, *SIDES),), text_lengths=(4,))))
    return most


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    jobs = {str(experts): ranks.Job(count, {"experts": experts}) for experts in EXPERTS}
    return list(ranks.run_jobs(tmp_path_factory.mktemp("growth"), jobs).values())


@pytest.mark.parametrize(("work", "within"), [("walks", 0.02), ("updates", 0.2)])
def test_work_grows_linearly_with_experts(counts, work, within):
    """If work grew quadratically, the second difference would be larger by half or more."""
    few, more, most = (found[work] for found in counts)
    assert few < more < most
    assert most - more == pytest.approx(more - few, rel=within)


def test_no_noise_is_drawn_for_tokens(tmp_path_factory):
    """Drawing it would take a second for a pack of a million pixels, and a trace does not use it."""
    (found,) = ranks.run_jobs(tmp_path_factory.mktemp("noise"), {"noise": ranks.Job(real_random_numbers)}).values()
    real, without_values = found
    assert real == 0
    assert without_values >= SIDES[0] * SIDES[1] > FEW_NUMBERS
