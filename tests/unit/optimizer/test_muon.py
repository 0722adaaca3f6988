"""Muon's update of a weight equals torch's; matrices that are stored together are updated separately."""

import math

import pytest
import torch

from benchmarks.parallel_training import tiny_model
from dit.backends.sharding import Matrices, ParameterSharding, adapter_shardings
from dit.boxes import Part
from dit.kernels import muon
from dit.kernels.adamw import Elements, Rates
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.muon import assign, direction, in_rounds, operations
from dit.parallel.build import build_on_meta
from dit.parallel.dims import ParallelConfig
from dit.planner.devices import H100
from dit.planner.job import Job
from dit.planner.time import Cluster, cost_of, product_seconds, step_time
from dit.settings import OptimizerConfig, TrainingConfig
from dit.tracing.packs import PackShape

QKV, SWIGLU, OUT = Matrices(((4, 1), (2, 1), (2, 1))), Matrices(((2, 2),)), Matrices(((4, 1), (2, 1)), dim=1)


def rates(clip: float, lr: float = 0.02, weight_decay: float = 0.3) -> Rates:
    return Rates(
        lr=lr, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=weight_decay, step=1, clip=torch.tensor(clip), average=0.5
    )


def elements(shape: tuple[int, int]) -> Elements:
    gradient, main = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    return Elements(gradient, main, torch.zeros(shape), torch.empty(0), main.clone())


@pytest.mark.parametrize("shape", [(8, 8), (8, 24), (24, 8)])
def test_a_weight_trains_as_with_muon_of_torch(shape):
    """In bf16, the precision of `torch.optim.Muon`; the scale is rounded once more, to 8 bits."""
    p = elements(shape)
    weight = torch.nn.Parameter(p.main.clone())
    theirs = torch.optim.Muon([weight], lr=0.02, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        p.gradient.mul_(-0.7 if step % 2 else 1.1)
        weight.grad = 0.5 * p.gradient
        theirs.step()
        update = muon.momentum(p, rates(0.5), 0.9).bfloat16().view(shape)
        muon.apply(p, rates(0.5), direction(update, Matrices()))
        assert torch.equal(p.exp_avg, theirs.state[weight]["momentum_buffer"])
        bound = (step + 1) * 2**-8 * 0.02 * 0.2 * math.sqrt(max(shape)) * 1.5
        torch.testing.assert_close(p.main, weight.detach(), rtol=1e-6, atol=bound)


def test_the_direction_has_the_published_singular_values():
    """Each singular value goes through the quintic polynomial five times; exact to float64 rounding."""
    x = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    u, s, v = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    expected = 0.2 * 3 * (u * s) @ v
    torch.testing.assert_close(direction(x, Matrices()), expected, rtol=1e-9, atol=1e-12)


def test_a_bad_step_changes_no_state():
    p = elements((4, 6))
    p.exp_avg.copy_(p.gradient)
    p.gradient[0, 0] = math.inf
    before = [t.clone() for t in (p.main, p.exp_avg, p.average)]
    muon.apply(p, rates(math.nan), direction(muon.momentum(p, rates(math.nan), 0.9).view(4, 6), Matrices()))
    assert all(torch.equal(a, b) for a, b in zip(before, (p.main, p.exp_avg, p.average)))


@pytest.mark.parametrize("matrices", [QKV, SWIGLU, OUT])
def test_interleaved_storage_has_the_directions_of_separate_matrices(matrices):
    """For any order of rows or columns; the test concatenates them by hand."""
    weight = torch.randn(24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    labels = [0] * 4 + [1] * 2 + [2] * 2 if matrices is QKV else [0, 1] if matrices is SWIGLU else [0] * 4 + [1] * 2
    labels = torch.tensor(labels * (24 // len(labels)))
    found = direction(weight, matrices)
    for label in set(labels.tolist()):
        index = (slice(None), labels == label) if matrices.dim else (labels == label,)
        torch.testing.assert_close(found[index], direction(weight[index], Matrices()), rtol=1e-9, atol=1e-12)


def test_a_low_rank_adapter_has_the_matrices_of_its_weight():
    a, b = adapter_shardings(ParameterSharding(split_dim=0, matrices=QKV))
    assert (a.matrices, b.matrices) == (Matrices(), QKV)
    a, b = adapter_shardings(ParameterSharding(split_dim=1, matrices=OUT))
    assert (a.matrices, b.matrices) == (OUT, Matrices())
    assert adapter_shardings(ParameterSharding())[0].matrices is None


def test_owners_are_balanced_and_have_local_elements():
    """Eight equal weights with copies on four ranks, and one weight that only two ranks have."""
    part, halves = (
        Part((8, 8), (8, 8), (0, 0), 0, 64),
        [Part((8, 8), (8, 8), (0, 0), *span) for span in ((0, 30), (30, 64))],
    )
    tables = [{f"w{i}": (part, Matrices()) for i in range(8)} for _ in range(4)]
    for table, half in zip(tables[2:], halves):
        table["shared"] = half, Matrices()
    weights = {weight.name: weight for weight in assign(tables)}
    counts = [sum(weight.owner == rank for weight in weights.values()) for rank in range(4)]
    assert sorted(counts) == [2, 2, 2, 3]
    assert weights["shared"].owner in (2, 3)
    assert weights["shared"].sources == [2, 3]
    assert all(weights[f"w{i}"].sources == [weights[f"w{i}"].owner] for i in range(8))


def test_a_round_has_at_most_the_limit_of_elements():
    """Weights of 60 and 40 elements fill a round of 100, those of 36 and 24 share the next; 120 has its own round."""
    parts = {f"w{rows}": Part((rows, 4), (rows, 4), (0, 0), 0, 4 * rows) for rows in (30, 15, 10, 9, 6)}
    weights = assign([{name: (part, Matrices()) for name, part in parts.items()}])
    rounds = in_rounds(weights, 100)
    assert [[w.shape[0] for w in weights] for weights in rounds] == [[30], [15, 10], [9, 6]]


@pytest.mark.parametrize("data_parallel", ["ddp", "distributed_optimizer", "fsdp"])
def test_a_plan_counts_one_moment_and_the_operations(one_tracer, data_parallel):
    model, training = tiny_model(num_layers=1), TrainingConfig(ema_decay=None)
    adamw, by_muon = OptimizerConfig(), OptimizerConfig(algorithm="muon")
    parts = (ParallelConfig(data_parallel=data_parallel), training, PackShape(((1, 4, 8),), text_lengths=(4,)))
    steps = one_tracer([Job(model, FlowMatching(), settings, *parts) for settings in (adamw, by_muon)])
    weights = [(tuple(p.shape), p.sharding.matrices) for p in build_on_meta(model).parameters() if p.sharding.matrices]
    saved = steps[0].state_bytes["optimizer"] - steps[1].state_bytes["optimizer"]
    assert saved == pytest.approx(4 * sum(math.prod(shape) for shape, _ in weights), rel=1e-2)
    products = steps[1].parts["update"].products
    counted = sum(2 * p.batch * p.m * p.n * p.k * count for p, count in products.items())
    assert counted == sum(operations(*weight) for weight in weights)


@pytest.mark.parametrize(
    ("data_parallel", "tensor", "least", "most"),
    [
        ("ddp", 1, 3, 3),
        pytest.param("distributed_optimizer", 1, 0, 1, marks=pytest.mark.slow),
        ("fsdp", 1, 0, 1),
        ("distributed_optimizer", 2, 1, 2),
    ],
)
def test_a_plan_counts_each_matrix_once_and_its_exchange(one_tracer, data_parallel, tensor, least, most):
    """Four ranks have the operations of one; replicas send three copies, other ranks the parts that the owner lacks.

    Args:
        least, most: bounds on how often each element is sent.
    """
    model, training = tiny_model(num_layers=1), TrainingConfig(ema_decay=None)
    layout = ParallelConfig(
        data_parallel=data_parallel, tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1
    )
    parts = OptimizerConfig(algorithm="muon"), layout, training, PackShape(((1, 4, 8),), text_lengths=(4,))
    steps = one_tracer([Job(model, FlowMatching(), *parts, world_size=4, rank=rank) for rank in range(4)])
    updates = [step.parts["update"] for step in steps]
    weights = [(tuple(p.shape), p.sharding.matrices) for p in build_on_meta(model).parameters() if p.sharding.matrices]
    products = [item for update in updates for item in update.products.items()]
    counted = sum(2 * p.batch * p.m * p.n * p.k * count for p, count in products)
    assert counted == pytest.approx(sum(operations(*weight) for weight in weights))
    sent = sum(nbytes for update in updates for (kind, _), nbytes in update.sent_bytes.items() if kind == "all_to_all")
    elements = sum(math.prod(shape) for shape, _ in weights)
    assert least <= round(sent / torch.bfloat16.itemsize / elements, 3) <= most


def test_a_plan_adds_the_time_of_products_and_exchange(one_tracer):
    model, training = tiny_model(num_layers=1), TrainingConfig(ema_decay=None)
    layout, pack = ParallelConfig(data_parallel="ddp"), PackShape(((1, 4, 8),), text_lengths=(4,))
    jobs = [
        Job(model, FlowMatching(), settings, layout, training, pack, world_size=4)
        for settings in (OptimizerConfig(), OptimizerConfig(algorithm="muon"))
    ]
    steps, cluster = one_tracer(jobs), Cluster(H100, 4, layout)
    times = [step_time(cost_of(step, 1, cluster), 1, cluster).parts["optimizer"] for step in steps]
    update = steps[1].parts["update"]
    exchange = cluster.seconds("dp", update.sent_bytes["all_to_all", "dp"], 2)
    computed = sum(count * product_seconds(product, H100) for product, count in update.products.items())
    assert times[1] - times[0] > exchange + computed > 0
