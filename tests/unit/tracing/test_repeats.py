"""A cached operation has the same result as the operation itself."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dit.tracing.repeats import FakeOpCache

aten = torch.ops.aten
ROWS, FACTORS = torch.tensor([3, 0, 3]), torch.ones(4, 6)  # with values
NOT_ANSWERED = ("view as a type", "shape of an argument", "view of a table", "into a table")


def cases(x, y):
    """Return operations with their arguments."""
    return {
        "new": (aten.add.Tensor, (x, y)),
        "number": (aten.add.Tensor, (x, 1)),
        "float": (aten.add.Tensor, (x, 1.0)),
        "in place": (aten.add_.Tensor, (x, y)),
        "view": (aten.t.default, (x,)),
        "slice": (aten.slice.Tensor, (x, 0, 1, 3)),
        "slice from the end": (aten.slice.Tensor, (x, 1, -5, 1 << 62, 2)),
        "empty slice": (aten.slice.Tensor, (x, -1, 4, 2)),
        "first rows": (aten.slice.Tensor, (x,)),
        "slice by names": (aten.slice.Tensor, (x,), {"dim": 1, "end": 3}),
        "views": (aten.split.Tensor, (x, 2)),
        "view as a type": (aten.view.dtype, (x, torch.int16)),
        "several": (aten.native_layer_norm.default, (x, [6], None, None, 1e-5)),
        "list": (aten.cat.default, ([x, y],)),
        "shape of an argument": (aten.unsqueeze_.default, (x, 0)),
        "table": (aten.mul.Tensor, (FACTORS, x)),
        "into a tensor": (aten.index_copy_.default, (y, 0, ROWS[:2], FACTORS[:2])),
        "rows": (aten.index.Tensor, (x, [ROWS])),
        "view of a table": (aten.t.default, (FACTORS,)),
        "into a table": (aten.add_.Tensor, (FACTORS, x)),
    }


@pytest.mark.parametrize("name", cases(None, None))
def test_a_cached_result_equals_the_computed_result(name):
    cache, mode, found = FakeOpCache(), FakeTensorMode(allow_non_fake_inputs=True), []
    for _ in range(2):
        with mode:
            storage = torch.zeros(4, 12, dtype=torch.bfloat16)
            x, y = storage[:, 2:8], torch.ones(4, 6)
            func, args, *kwargs = cases(x, y)[name]
            out = cache.run(func, args, *(kwargs or [{}]))
            found.append(described(out, (x, y)))
    assert found[0] == found[1]
    assert len(cache._cache) == 1
    assert (None in cache._cache.values()) == (name in NOT_ANSWERED)


def test_an_operation_without_results_allocates_no_memory():
    """Torch has no fake implementation of the fused update, and would run it on tensors with memory."""
    numbers = dict.fromkeys(("beta1", "beta2", "weight_decay", "eps"), 0.5)
    options = {"lr": torch.ones(()), **numbers, "amsgrad": False, "maximize": False}
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = [torch.zeros(1 << 44)]
        arguments = values, values, values, values, [], [torch.ones(())]
        assert FakeOpCache().run(aten._fused_adamw_.tensor_lr, arguments, options) is None


def described(out, given):
    """Return the properties of tensors without values, and the inputs with which they share memory."""
    tensors = out if isinstance(out, list | tuple) else [out]
    return type(out), [
        x
        if x is None
        else (
            *(x.shape, x.stride(), x.dtype, x.storage_offset(), x.device, x.untyped_storage().nbytes()),
            [x is y for y in given],
            [x.untyped_storage()._cdata == y.untyped_storage()._cdata for y in given],
        )
        for x in tensors
    ]


def test_host_values_are_not_treated_as_shapes():
    cache = FakeOpCache()
    for ends in ([2], [2, 4]):
        assert cache.run(aten.add.Tensor, (torch.tensor(ends), 1), {}).tolist() == [end + 1 for end in ends]
    assert not any(cache._cache.values())


def test_a_mask_is_not_treated_as_a_table_of_rows():
    cache = FakeOpCache()
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.ones(4, 6)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"dynamic|nonzero"):
            cache.run(aten.index.Tensor, (x, [FACTORS[:, 0] > 0]), {})


def test_a_cached_result_has_all_attributes_of_a_fake_tensor():
    cache, calls = FakeOpCache(), []
    with FakeTensorMode():
        x = torch.ones(4, 6)
        for _ in range(2):
            calls.append(cache.run(aten.add.Tensor, (x, 1), {}))
    assert vars(calls[1]) == vars(calls[0])
