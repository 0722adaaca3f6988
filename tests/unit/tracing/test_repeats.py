"""An answered operation gives what the operation itself gives."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dit.tracing.repeats import Repeats

aten = torch.ops.aten


def cases(x, y):
    """Return operations with their arguments."""
    return {
        "new": (aten.add.Tensor, (x, y)),
        "number": (aten.add.Tensor, (x, 1)),
        "float": (aten.add.Tensor, (x, 1.0)),
        "in place": (aten.add_.Tensor, (x, y)),
        "view": (aten.t.default, (x,)),
        "views": (aten.split.Tensor, (x, 2)),
        "view as a type": (aten.view.dtype, (x, torch.int16)),
        "several": (aten.native_layer_norm.default, (x, [6], None, None, 1e-5)),
        "list": (aten.cat.default, ([x, y],)),
        "none": (aten._foreach_add_.Scalar, ([x, y], 1)),
        "shape of an argument": (aten.unsqueeze_.default, (x, 0)),
    }


@pytest.mark.parametrize("name", cases(None, None))
def test_an_answer_is_like_the_result(name):
    repeats, mode, found = Repeats(), FakeTensorMode(), []
    for _ in range(2):
        with mode:
            storage = torch.zeros(4, 12, dtype=torch.bfloat16)
            x, y = storage[:, 2:8], torch.ones(4, 6)
            func, args = cases(x, y)[name]
            out = repeats.run(func, args, {})
            found.append(described(out, (x, y)))
    assert found[0] == found[1]
    assert len(repeats._known) == 1
    assert (None in repeats._known.values()) == (name in ("view as a type", "shape of an argument"))


def described(out, given):
    """Return what distinguishes tensors without values, and which of those given they share memory with."""
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


def test_values_on_the_host_are_not_taken_for_shapes():
    repeats = Repeats()
    for ends in ([2], [2, 4]):
        assert repeats.run(aten.add.Tensor, (torch.tensor(ends), 1), {}).tolist() == [end + 1 for end in ends]
    assert not repeats._known
