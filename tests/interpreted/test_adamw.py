"""The fused AdamW, which also updates the average and the model's copy, against its formula in float64."""

from dataclasses import replace

import pytest
import torch

from dit.kernels import adamw as eager
from dit.kernels.adamw import Elements, Rates
from dit.kernels.fused import adamw as fused
from dit.kernels.fused.gpu import adamw as gpu
from dit.kernels.fused.gpu.adamw import BLOCK, CHUNK
from dit.kernels.graph_tables import graph_tables
from tests.interpreted.formulas import ULP

ULPS = 2.5  # of the largest number that an element's update adds: four roundings, and those of the square root
RATES = Rates(lr=3e-2, beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.1, step=3, clip=torch.tensor(0.37), average=0.3)
SIZES = (1, 5, BLOCK, BLOCK + 3, CHUNK + BLOCK - 1)
FIELDS = ("main", "exp_avg", "exp_avg_sq", "average")


def parameters(sizes=SIZES, *, average=True, model=True, shift=0):
    """Return random parameters of these sizes; each tensor starts `shift` elements after the start of its storage."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for size in sizes:
        drawn = [torch.randn(shift + size, generator=generator)[shift:] for _ in range(5)]
        drawn[3] = drawn[3].square()
        copy = torch.zeros(shift + size, dtype=torch.bfloat16)[shift:] if model else None
        found.append(Elements(*drawn[:4], drawn[4] if average else None, copy))
    return found


def copied(found, dtype=None):
    return [
        Elements(*(None if t is None else t.to(dtype or t.dtype, copy=True) for t in vars(one).values()))
        for one in found
    ]


def formula(p: Elements, r: Rates) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return each new value in float64, and the magnitude of its summands."""
    g, w, m, v, a = (t.double() for t in (p.gradient * r.clip, p.main, p.exp_avg, p.exp_avg_sq, p.average))
    m_new, v_new = r.beta1 * m + (1 - r.beta1) * g, r.beta2 * v + (1 - r.beta2) * g**2
    corrected = (m_new / (1 - r.beta1**r.step)) / ((v_new / (1 - r.beta2**r.step)).sqrt() + r.eps)
    w_new = w - r.lr * r.weight_decay * w - r.lr * corrected
    a_new, size = (1 - r.average) * a + r.average * w_new, w.abs() + (r.lr * corrected).abs()
    return {
        "main": (w_new, size),
        "exp_avg": (m_new, m.abs() + g.abs()),
        "exp_avg_sq": (v_new, v + g**2),
        "average": (a_new, a.abs() + size),
    }


def assert_is_the_formula(found, before, rates, ulps=ULPS):
    for new, old in zip(found, before, strict=True):
        for name, (want, size) in formula(old, rates).items():
            error = float(((getattr(new, name).double() - want).abs() / size).max()) / ULP[torch.float32]
            assert error <= ulps, f"{name} of {want.numel()} elements is off by {error:.1f} ulps"


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not_aligned"])
def test_every_element_equals_the_formula(step, shift):
    """Sizes just below and above a block and a chunk. The copy is the main weight, as the interpreter rounds it."""
    rates, found = replace(RATES, step=step), parameters(shift=shift)
    before = copied(found)
    fused.adamw(found, rates)
    assert_is_the_formula(found, before, rates)
    for new, old in zip(found, before):
        assert torch.equal(new.gradient, old.gradient)
        assert ((new.model.float() - new.main).abs() <= ULP[torch.bfloat16] * new.main.abs()).all()


def test_the_eager_form_equals_the_formula():
    found = parameters()
    before = copied(found)
    eager.adamw(found, RATES)
    assert_is_the_formula(found, before, RATES)
    assert all(torch.equal(p.model, p.main.bfloat16()) for p in found)


@pytest.mark.parametrize("form", [fused.adamw, eager.adamw], ids=["fused", "eager"])
def test_nothing_changes_if_the_factor_is_nan(form):
    """A NaN clip factor marks a bad step; its gradients may be NaN too."""
    found = [replace(p, gradient=p.gradient * torch.nan, model=p.main.bfloat16()) for p in parameters()]
    before = copied(found)
    form(found, replace(RATES, clip=torch.tensor(torch.nan)))
    for new, old in zip(found, before, strict=True):
        assert all(torch.equal(getattr(new, name), getattr(old, name)) for name in (*FIELDS, "model"))


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("model", [True, False])
def test_missing_tensors_of_a_parameter_are_neither_read_nor_written(average, model):
    found = parameters(average=average, model=model)
    both = parameters()
    fused.adamw(found, RATES)
    fused.adamw(both, RATES)
    for new, reference in zip(found, both):
        names = FIELDS[:3] + ("average",) * average + ("model",) * model
        assert all(torch.equal(getattr(new, name), getattr(reference, name)) for name in names)


def test_the_copy_may_be_fp16():
    found = [replace(p, model=torch.zeros_like(p.main, dtype=torch.float16)) for p in parameters()]
    fused.adamw(found, RATES)
    for p in found:
        assert ((p.model.float() - p.main).abs() <= 2.0**-10 * p.main.abs() + 2.0**-24).all()


def test_neighbours_in_one_buffer_do_not_change():
    """The kernel writes no element before the first or after the last one of a parameter."""
    buffers = torch.randn(5, 300).abs()
    inner = Elements(*(row[7:190] for row in buffers), torch.zeros(300, dtype=torch.bfloat16)[7:190])
    before = buffers.clone()
    fused.adamw([inner], RATES)
    changed = (buffers != before).any(0)
    assert changed.nonzero().flatten().tolist() == list(range(7, 190))


def test_offsets_have_64_bits():
    """The chunk after 2**31 elements of a parameter, whose addresses are chosen so that this chunk is in memory."""
    found, number = parameters((CHUNK,)), 2**31 // CHUNK + 1
    before = copied(found)
    p, first = found[0], number * CHUNK
    tensors = p.gradient, p.main, p.exp_avg, p.exp_avg_sq, p.average, p.model
    row = [*(x.data_ptr() - first * x.element_size() for x in tensors), first + CHUNK]
    chunks = torch.tensor([[0, number]], dtype=torch.int32)
    flags = {"average": True, "model": True, "half": False, "aligned": False}
    gpu.adamw(torch.tensor([row]), chunks, RATES.clip, RATES.on_device, **flags)
    assert_is_the_formula(found, before, RATES)


def test_a_weight_of_one_copies_the_weights_into_the_average():
    found = parameters()
    fused.adamw(found, replace(RATES, average=1.0))
    assert all(torch.equal(p.average, p.main) for p in found)


def test_twenty_updates_match_adamw_of_torch():
    """Errors do not accumulate: after 20 updates with changing rates the weights are within 16 ulps of torch's."""
    found = parameters((100,))
    weight = torch.nn.Parameter(found[0].main.clone())
    found[0].exp_avg.zero_()
    found[0].exp_avg_sq.zero_()
    reference = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(8)
    for step in range(1, 21):
        reference.param_groups[0]["lr"] = lr = 1e-2 / step
        weight.grad = torch.randn(100, generator=generator)
        found[0].gradient.copy_(weight.grad)
        fused.adamw(found, Rates(lr, 0.9, 0.95, 1e-6, 0.1, step, torch.ones(())))
        reference.step()
    size = weight.detach().abs().clamp(min=0.1)
    assert float(((found[0].main - weight.detach()).abs() / size).max()) <= 16 * ULP[torch.float32]


def test_a_graph_keeps_its_table_of_addresses(monkeypatch):
    """The update runs eagerly before its capture; other updates then fill the cache of tables."""
    launches, found = [], parameters((5,))
    fused.adamw(found, RATES)
    with graph_tables() as tables, monkeypatch.context() as patches:
        patches.setattr(gpu, "adamw", lambda table, *_, **__: launches.append(table))
        fused.adamw(found, RATES)
    assert any(table is launches[0] for table, _ in tables)
