"""Laws of conversion rules: each form has an exact inverse, and unused or damaged tensors are errors."""

import inspect

import diffusers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dit.convert.diffusers_format import TrainedModel, arguments_of, formats
from dit.convert.original_dit import drop_variance
from dit.convert.rules import (
    POINTWISE,
    SAME,
    TURNED_HEAD,
    Axes,
    ByHead,
    Copies,
    Form,
    Negated,
    Rule,
    RuleBook,
    SwappedHalves,
    layer_rules,
)
from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.objective_checks import check_outputs
from dit.objectives.ddpm import DDPM, LearnedVariance


@st.composite
def fused(draw: st.DrawFn) -> ByHead:
    shares = tuple(draw(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=4)))
    turned = tuple(i for i in range(len(shares)) if draw(st.booleans()))
    alternate = draw(st.booleans()) and len(shares) > 1
    if alternate:
        shares = (*shares[:-1], shares[-2])
    heads, dim = draw(st.integers(1, 4)), draw(st.sampled_from([0, 1]))
    return ByHead(heads, shares, turned, draw(st.booleans()), dim, alternate)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


@settings(deadline=None)
@given(fused())
def test_by_head_is_a_permutation_and_its_inverse_undoes_it(form: ByHead):
    size = form.heads * sum(form.shares)
    actual = numbered(size, 5) if form.dim == 0 else numbered(5, size)
    external = form.to_external(actual)
    assert [x.shape[form.dim] for x in external] == (
        [size] if form.fused else [form.heads * share for share in form.shares]
    )
    assert torch.equal(form.from_external(external), actual)
    assert torch.equal(torch.cat([x.flatten() for x in external]).sort().values, actual.flatten().sort().values)


def test_by_head_gives_each_head_its_share_of_every_part():
    """Two heads of four features: q with reordered pairs, then v unchanged."""
    q, v = torch.arange(8), torch.arange(100, 108)
    actual = ByHead(2, (4, 4), turned=(0,)).from_external([q, v])
    assert actual.tolist() == [0, 2, 1, 3, 100, 101, 102, 103, 4, 6, 5, 7, 104, 105, 106, 107]


def test_gates_and_values_alternate_in_each_head():
    """Two heads; each has one feature, then two gates and two values in turn."""
    parts = [torch.arange(start, start + count) for start, count in ((0, 2), (10, 4), (20, 4))]
    actual = ByHead(2, (1, 2, 2), alternate=True).from_external(parts)
    assert actual.tolist() == [0, 10, 20, 11, 21, 1, 12, 22, 13, 23]


def test_reordered_rotary_pairs_keep_every_score():
    """Rotating neighbouring features, or halves, by equal angles gives the same products of queries and keys."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2))
    angle = torch.rand(3, generator=generator, dtype=torch.float64)

    def neighbours(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x.view(3, 2)) * torch.polar(torch.ones_like(by), by)).flatten()

    def halves(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2)
        return torch.cat([a * by.cos() - b * by.sin(), b * by.cos() + a * by.sin()])

    external = neighbours(q, 2 * angle) @ neighbours(k, 5 * angle)
    actual = halves(TURNED_HEAD.from_external([q]), 2 * angle) @ halves(TURNED_HEAD.from_external([k]), 5 * angle)
    torch.testing.assert_close(actual, external)


@pytest.mark.parametrize(
    ("form", "external"),
    [
        (SAME, [numbered(4, 3)]),
        (Copies(2), [numbered(4, 3), numbered(4, 3)]),
        (Axes("d c ph pw -> d (ph pw c)", {"ph": 2, "pw": 2}), [numbered(4, 3, 2, 2)]),
        (SwappedHalves(), [numbered(6, 2)]),
        (POINTWISE, [numbered(4, 3, 1, 1)]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_forms_are_inverted_exactly(form: Form, external: list[torch.Tensor]):
    back = form.to_external(form.from_external(external))
    assert len(back) == len(external)
    assert all(torch.equal(x, y) for x, y in zip(back, external))


def test_halves_are_swapped():
    assert SwappedHalves().from_external([torch.arange(6)]).tolist() == [3, 4, 5, 0, 1, 2]


def test_a_table_of_names_gives_the_rules_of_all_blocks():
    """Blocks of one stream follow those with two, and are numbered from 0; a form of one block precedes others."""
    names = {"layers.#.(a|b)": "two.#.(x.q|x.k|y.q|y.k)", "single.#.a": "one.#.z", "scale": "norm.weight"}
    forms: dict[str, Form] = {"layers.#.(a|b)": ByHead(1, (2, 2)), "layers.1.b": Negated(), "single.#.a": Copies(2)}
    parameters = ["layers.0.b.weight", "layers.1.b.weight", "layers.3.a.bias", "scale", "other.weight"]
    rules = layer_rules(parameters, names, forms, num_joint=2)
    assert [(rule.name, rule.external_names) for rule in rules] == [
        ("layers.0.b.weight", ("two.0.y.q.weight", "two.0.y.k.weight")),
        ("layers.1.b.weight", ("two.1.y.q.weight", "two.1.y.k.weight")),
        ("layers.3.a.bias", ("one.0.z.bias", "one.1.z.bias")),
        ("scale", ("norm.weight",)),
    ]
    assert [rule.form for rule in rules[:2]] == [ByHead(1, (2, 2)), Negated()]
    with pytest.raises(AssertionError, match=r"3 names in \(q\|k\|v\) for 2"):
        layer_rules(parameters, {"(a|b)": "(q|k|v)"}, {})
    with pytest.raises(AssertionError, match=r"forms of layers without a name: .*layers\.2\.c\.weight"):
        layer_rules(parameters, names, {"layers.2.c.weight": Negated()})


def book(**options) -> RuleBook:
    return RuleBook({"a": (2,), "b": (3,)}, [Rule("a", ("x",)), Rule("b", ("y",))], **options)


def test_conversion_rules_cover_every_parameter_and_tensor_once():
    with pytest.raises(AssertionError):
        RuleBook({"a": (2,), "b": (3,)}, [Rule("a", ("x",))])
    with pytest.raises(AssertionError, match="two rules"):
        RuleBook({"a": (2,), "b": (3,)}, [Rule("a", ("x",)), Rule("b", ("x",))])
    with pytest.raises(ConfigError, match="1 unknown: c"):
        book().to_external({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_of_every_precision_are_imported_exactly(dtype: torch.dtype):
    x = torch.tensor([1 / 3, -2e-3]).to(dtype)
    found = book().from_external({"x": x, "y": torch.zeros(3)})["a"]
    assert found.dtype == torch.float32
    assert torch.equal(found.to(dtype), x)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, dtype=torch.int8), "x has dtype torch.int8; quantised"),
        (torch.zeros(2).to(torch.float8_e4m3fn), "x has dtype torch.float8_e4m3fn; quantised"),
        (torch.tensor([1.0, float("nan")]), "x has 1 numbers that are not finite"),
    ],
)
def test_tensors_with_invalid_numbers_are_refused(x: torch.Tensor, message: str):
    with pytest.raises(ConfigError, match=message):
        book().from_external({"x": x, "y": torch.zeros(3)})


def test_exported_tensors_share_no_storage():
    """Safetensors files cannot have two names for one storage."""
    shared = RuleBook({"a": (2,)}, [Rule("a", ("x", "y"), Copies(2))]).to_external({"a": torch.ones(2)})
    assert shared["x"].data_ptr() != shared["y"].data_ptr()


def test_dropping_the_variance_keeps_the_mean_of_every_position():
    model = DiTConfig(in_channels=2, out_channels=4, patch_spatial=2)
    rows = numbered(16)  # four positions of (2 means, 2 variances)
    learned = DDPM(discrete_steps=1000, variance=LearnedVariance())
    trained = TrainedModel(model, learned, (1, 4, 4), {"solver": "ancestral", "variance": "learned"})
    weights = {"head.linear.weight": rows[:, None], "head.linear.bias": rows, "other": rows}
    mean, others = drop_variance(trained, weights)
    assert (mean.model.out_channels, mean.objective) == (None, DDPM(discrete_steps=1000))
    assert mean.sampling == {"solver": "ancestral"}
    check_outputs(mean.objective, mean.model)
    expected = [0, 1, 4, 5, 8, 9, 12, 13]
    assert others["head.linear.bias"].tolist() == expected == others["head.linear.weight"][:, 0].tolist()
    assert others["other"] is rows


@pytest.mark.parametrize("name", [form.class_name for form in formats()])
def test_recorded_arguments_match_the_constructors_of_diffusers(name: str) -> None:
    parameters = dict(inspect.signature(getattr(diffusers, name).__init__).parameters)
    del parameters["self"]
    defaults = {argument: parameter.default for argument, parameter in parameters.items()}
    recorded = dict(arguments_of(name))
    assert recorded == {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
