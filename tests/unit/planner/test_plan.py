"""A plan from traces of a few layers and micro-batches equals the trace of the whole step."""

import pytest

from benchmarks.parallel_training import tiny_model
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig, ParallelDims
from dit.planner.plan import plan
from dit.planner.trace import Job, trace
from dit.settings import OptimizerConfig, TrainingConfig
from dit.tracing.packs import PackShape

PACK = PackShape(((1, 4, 8), (1, 4, 8)), text_lengths=(4, 4))
OF_PEAK = 0.01
CASES = {
    "dit_cross": ({"backbone": "dit_cross", "num_layers": 4}, {"data_parallel": "ddp"}, 3),
    "stdit": ({"backbone": "stdit", "num_layers": 6}, {"tensor_model_parallel_size": 2}, 1),
}


@pytest.mark.parametrize("name", ["dit_cross", pytest.param("stdit", marks=pytest.mark.matrix)])
def test_a_plan_is_the_trace_of_the_whole_step(name):
    sizes, layout, micro_batches = CASES[name]
    model, parallel = tiny_model(hidden_size=64, **sizes), ParallelConfig(**layout)
    parts = (model, FlowMatching(), OptimizerConfig(), parallel, TrainingConfig(precision="fp32"), PACK)
    dims = ParallelDims(2, 2 // parallel.tensor_model_parallel_size, 1, micro_batches, 1)
    planned = plan(*parts, dims).fullest
    ((whole,),) = trace([Job(*parts, world_size=2, micro_batches=(micro_batches,))])
    assert planned.flops == whole.flops > 0
    assert planned.calls == whole.calls
    assert planned.moved_bytes == pytest.approx(whole.moved_bytes, rel=OF_PEAK)
    for kind, sent in whole.sent_bytes.items():
        assert planned.sent_bytes[kind] == pytest.approx(sent, rel=OF_PEAK)
    assert planned.live == pytest.approx(whole.live, rel=OF_PEAK)
    assert planned.peak == pytest.approx(whole.peak, rel=OF_PEAK)
