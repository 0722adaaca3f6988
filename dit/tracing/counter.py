"""Counter of operations: computation, memory, traffic and host synchronisations of a program."""

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter, tree_map_only

from dit.backends.process_groups import ProcessGroups
from dit.kernels.attention import count_sums

REAL_ELEMENTS = 1 << 23
REAL_FLOATS = 1 << 12
"""Operations on integers of up to `REAL_ELEMENTS`, and on floats of up to `REAL_FLOATS`, compute real values."""
CPU, META = torch.device("cpu"), torch.device("meta")
COPY, NUMBER = torch.ops.aten._to_copy.default, torch.ops.aten._local_scalar_dense.default
MASKED, SORT = torch.ops.aten.masked_select.default, torch.ops.aten.sort.stable
CONVOLUTIONS = {torch.ops.aten.convolution.default: 0, torch.ops.aten.convolution_backward.default: 1}
"""Convolutions, with the index of their input in the arguments."""
ANSWER = 1000
"""Value that the host reads from a tensor without values; a gradient norm of this size is clipped."""
STATE = ("weights and gradients", "optimizer", "average")
PHASES = ("forward and backward", "gradient exchange", "gradient norm", "update")
ATTENTION, ATTENTION_BACKWARD, OPS = WORK = "attention flops", "attention backward flops", "device ops"
"""Kinds of counted work, in addition to matrix products, moved and sent bytes."""
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Matrix products, with the index of their first factor in the arguments."""
COUNTS = ("flops", "moved_bytes", "host_syncs")
TABLES = ("state_bytes", "peak_bytes", "sent_bytes", "calls", "work")
"""Fields of `StepTrace`: numbers, and tables of integers."""
KINDS = {
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allreduce": "all_reduce",
    "alltoall_base": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "recv": "receive",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "send": "send",
}
"""Kinds of collectives, by name of the dispatched operation."""


class Product(NamedTuple):
    """A matrix product `[batch, m, k] x [batch, k, n]`, or a convolution as one, and the bytes of its tensors."""

    batch: int
    m: int
    n: int
    k: int
    nbytes: int


@dataclass
class StepTrace:
    """Counts of one rank in one optimizer step.

    Attributes:
        state_bytes: bytes allocated before the step, by purpose (`STATE`).
        peak_bytes: peak of allocated bytes, by phase of the step (`PHASES`).
        dq_bytes: bytes by which the sums inside the backward pass of attention exceed the peak of the first phase. Only
            one layer has them at a time, so they do not grow with the number of layers.
        flops: operations of matrix products and attention, two per multiply-add.
        moved_bytes: bytes that all other operations read and write (views move none).
        sent_bytes: bytes sent, by (kind of collective, name of the group); an all-reduce counts as a ring.
        calls: number of these collectives.
        host_syncs: number of times that the host waits for a value from the device.
        products: number of matrix products and convolutions by size.
        work: operations of attention, and number of operations that reach the device (`WORK`).
        parts: parts of the step: "forward" and "micro-batch" (forward and backward) of one micro-batch once the
            pipeline is full, and the "update" after the last micro-batch; only the update if the step has too few
            micro-batches.
    """

    state_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    moved_bytes: int = 0
    sent_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    host_syncs: int = 0
    products: dict[Product, float] = field(default_factory=dict)
    work: Counter[str] = field(default_factory=Counter)
    parts: dict[str, "StepTrace"] = field(default_factory=dict)
    dq_bytes: int = 0

    def copy(self) -> "StepTrace":
        """Return a copy of the current counts."""
        counts = {name: getattr(self, name).copy() for name in ("sent_bytes", "calls", "products", "work")}
        return replace(self, **counts)

    def since(self, earlier: "StepTrace") -> "StepTrace":
        """Return the counts since an earlier copy, without bytes of memory."""
        steps = [replace(step, state_bytes={}, peak_bytes={}, parts={}, dq_bytes=0) for step in (self, earlier)]
        return combined(steps, [1, -1])

    @property
    def live(self) -> int:
        """Bytes of state before the step, without weights that FSDP gathered early."""
        return sum(self.state_bytes.values())

    @property
    def peak(self) -> int:
        """The peak of the allocated bytes during the step."""
        return max(*self.peak_bytes.values(), self.peak_bytes[PHASES[0]] + self.dq_bytes)


def combined(steps: Sequence[StepTrace], weights: Sequence[float]) -> StepTrace:
    """Return the weighted sum of steps, with the largest `dq_bytes`; counts are rounded, except numbers of products."""

    def total(values: Iterable[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    def table(name: str) -> dict[Any, float]:
        tables = [getattr(step, name) for step in steps]
        return {key: total(t.get(key, 0) for t in tables) for key in dict.fromkeys(k for t in tables for k in t)}

    parts = [name for name in steps[0].parts if all(name in step.parts for step in steps)]
    counts: dict[str, Any] = {name: round(total(getattr(step, name) for step in steps)) for name in COUNTS}
    counts |= {name: Counter({key: round(value) for key, value in table(name).items()}) for name in TABLES}
    counts["parts"] = {name: combined([step.parts[name] for step in steps], weights) for name in parts}
    return StepTrace(products=table("products"), dq_bytes=max(step.dq_bytes for step in steps), **counts)


class StepCounter(TorchDispatchMode):
    """Counts every operation, and every storage while it exists; process groups give names to traffic.

    New tensors are on the meta device, so they have shapes but no memory, except for small tables of numbers. The
    program may create them for any device.

    Attributes:
        keeps_values: whether operations on tensors with values have results with values, also large ones.
    """

    keeps_values = False

    def __init__(self, groups: Optional[ProcessGroups] = None) -> None:
        super().__init__()
        self._formulas = flop_formulas()
        self._names = {} if groups is None else _names(groups)
        self._sorted: dict[Hashable, tuple[Tensor, ...]] = {}
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._finished_work: Any = None
        self.received_shape: list[int] = []
        self.live = self.peak = self._peak_of_dq = 0
        self.trace = StepTrace()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's check doubles the cost of a call

    def begin(self) -> None:
        """Start a step and reset all counts."""
        gc.collect()  # wrapped models have many reference cycles
        self.trace, self._peak_of_dq = StepTrace(), 0

    def enter(self, part: str) -> None:
        """Start a part of the step; only counters of waits distinguish parts."""

    def phase(self, name: str) -> None:
        """End a phase of the step and record its peak."""
        self.trace.peak_bytes[name] = self.peak
        if name == PHASES[0]:
            self.trace.dq_bytes = max(0, self._peak_of_dq - self.peak)
        self.peak = self.live

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or its new size, as allocated until it is freed."""
        key, size = storage._cdata, storage.nbytes()
        entry = self._sizes.get(key)
        if entry is None:
            self._sizes[key] = weakref.ref(storage, lambda _, key=key: self._freed(key)), size  # type: ignore[misc]
        elif entry[1] == size:
            return
        else:
            self._sizes[key] = entry[0], size
        self.live += size - (0 if entry is None else entry[1])
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((*args, *kwargs.values()))
        if any(map(is_traceable_wrapper_subclass, tensors)):
            return NotImplemented  # a DTensor has no memory; operations on its local tensor are dispatched here
        on_device = any(x.device == META for x in tensors)
        if func is NUMBER:
            self.trace.host_syncs += 1
            if on_device:
                return ANSWER if not tensors[0].dtype.is_floating_point else float(ANSWER)
        if func is MASKED and args[1].device != META:
            self.trace.host_syncs += 1
            func, args = torch.ops.aten.new_empty.default, (args[0], [int(args[1].sum())])
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs, on_device)
        if func is COPY and on_device and kwargs.get("device") == CPU and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0].detach()  # it is on the device of this process
        if on_device or not (self.keeps_values or _is_table(func, args, kwargs, tensors)):
            out = _on_meta(func, args, kwargs, tensors)
        else:
            kwargs = _with_device(kwargs, CPU)
            out = self._sort(args, kwargs) if func is SORT else func(*args, **kwargs)
        results = tensors_in((out,))
        for result in results:
            self.watch(result.untyped_storage())
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=out)
            self.trace.flops += flops
            nbytes = sum(x.nbytes for x in (*tensors, *results))
            self._count(func._overloadpacket.__name__, flops, args, results[0], nbytes)
        elif not func.is_view and not func.__name__.startswith("empty"):
            self.trace.moved_bytes += sum(x.nbytes for x in (*tensors, *results))
            self.trace.work[OPS] += on_device
        return out

    def _count(self, name: str, flops: int, args: Any, result: Tensor, nbytes: int) -> None:
        """Count a matrix product or an attention."""
        trace = self.trace
        trace.work[OPS] += 1
        if name in PRODUCTS:
            a, b = args[PRODUCTS[name] : PRODUCTS[name] + 2]
            product = Product(math.prod(a.shape[:-2]), a.shape[-2], b.shape[-1], a.shape[-1], nbytes)
        elif name == "grouped_product":
            groups, k, n = args[1].shape
            product = Product(groups, len(args[0]) // groups, n, k, nbytes)
        elif name == "grouped_gradient":
            groups, n, k = result.shape
            product = Product(groups, n, k, len(args[0]) // groups, nbytes)
        elif "convolution" in name:
            output = args[0] if "backward" in name else result  # or its gradient
            rows, columns = output.numel() // output.shape[1], output.shape[1]
            product = Product(1, rows, columns, flops // (2 * rows * columns), nbytes)
        else:
            if "backward" in name:
                self._peak_of_dq = max(self._peak_of_dq, self.live + _bytes_of_sums(*args))
            trace.work[ATTENTION_BACKWARD if "backward" in name else ATTENTION] += flops
            return
        trace.products[product] = trace.products.get(product, 0) + 1

    def _sort(self, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
        """Sort a table, or copy the result for an equal table: every layer sorts the same routing scores, slowly."""
        values = args[0].contiguous().flatten().view(torch.uint8).numpy().tobytes()
        key = args[0].shape, args[0].dtype, values, args[1:], tuple(kwargs.items())
        if key not in self._sorted:
            self._sorted[key] = SORT(*args, **kwargs)
        return tuple(x.clone() for x in self._sorted[key])

    def _communicate(self, func: Any, args: Any, kwargs: Any, on_device: bool) -> Any:
        """Count the bytes that a collective sends; received tables get the values that this rank would send."""
        kind = KINDS[func.__name__.split(".")[0].strip("_")]
        if on_device:
            out = self._without_copies(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
            self._fill(kind, args)
        group = next((g for g in map(_group, args) if g is not None), None)
        if group is not None and group.size() > 1 and kind not in ("receive", "barrier"):
            if kind == "send" and not args[0][0].is_floating_point():
                kind = "send shapes"
            key = kind, self._names.get(tuple(dist.get_process_group_ranks(group)), "other")
            self.trace.calls[key] += 1
            self.trace.sent_bytes[key] += _sent(kind, args, group)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self.watch(tensor.untyped_storage())
        return out

    def _without_copies(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a collective on tensors without values: its first argument, and a finished work.

        The first collective runs, and its `Work` of torch is that of all others, which would copy every rank's part.
        """
        has_output = len(func._schema.returns) > 1
        if self._finished_work is None:
            out = func(*args, **kwargs)
            self._finished_work = out[-1] if has_output else out
        return (args[0], self._finished_work) if has_output else self._finished_work

    def _fill(self, kind: str, args: Any) -> None:
        """Fill the outputs of a collective on real tables, as if every rank sent the same."""
        if kind == "receive":
            # Megatron-Core's pipelines send the shape of the next tensor.
            assert len(args[0][0]) == len(self.received_shape), "a received table that is not a shape"
            args[0][0].copy_(torch.tensor(self.received_shape))
        elif kind == "all_gather" and isinstance(args[0], Tensor):
            args[0].view(-1, args[1].numel()).copy_(args[1].flatten())
        elif kind == "all_gather":
            for outputs, sent_tensor in zip(args[0], args[1]):
                for output in outputs:
                    output.copy_(sent_tensor)
        elif kind == "all_to_all":
            args[0].copy_(args[1].flatten()[: args[0].numel()].view_as(args[0]))
        elif kind == "all_reduce":
            group, reduction = dist.ProcessGroup.unbox(args[1]), args[2]
            if "SUM" in str(getattr(reduction, "op", lambda: "SUM")()):
                for tensor in args[0]:
                    tensor.mul_(group.size())


def _on_meta(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """Run an operation on the meta device; one without results only writes values, so it is left out."""
    if tensors and not func._schema.returns:
        return None
    if any(x.device != META for x in tensors):
        args, kwargs = tree_map_only(Tensor, lambda x: x.to(META), (args, kwargs))
    out = func(*args, **_with_device(kwargs, META))
    if func in CONVOLUTIONS:  # on devices, they keep the memory format
        x = args[CONVOLUTIONS[func]]
        form = suggest_memory_format(x)
        return tree_map_only(Tensor, lambda y: y.to(memory_format=form) if y.dim() == x.dim() else y, out)
    return out


def _with_device(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Replace the device for which a program creates a tensor."""
    return kwargs if kwargs.get("device") is None else {**kwargs, "device": device}


def _is_table(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> bool:
    """Return whether an operation on tensors with values creates a small table, which is computed with real values."""
    if tensors:
        limit = REAL_FLOATS if any(x.is_floating_point() for x in tensors) else REAL_ELEMENTS
        return sum(x.numel() for x in tensors) <= limit
    dtype = kwargs.get("dtype")
    if func._overloadpacket is torch.ops.aten.arange:
        return all(isinstance(x, int) for x in args) and max(map(abs, args)) <= REAL_ELEMENTS
    shape = args[0] if args and isinstance(args[0], list | tuple) else ()
    if dtype is None:
        is_integer = func._overloadpacket is torch.ops.aten.full and isinstance(args[1], int)
    else:
        is_integer = not dtype.is_floating_point
    return is_integer and math.prod(shape) <= REAL_ELEMENTS


def _group(value: Any) -> Optional[Any]:
    """Convert an argument of a collective to a process group, if it is one."""
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return dist.ProcessGroup.unbox(value)
    return None


def _names(groups: ProcessGroups) -> dict[tuple[int, ...], str]:
    """Map the ranks of each group to its name; if groups have the same ranks, the first name wins."""
    names: dict[tuple[int, ...], str] = {}
    dense = ("tp", "cp", "pp", "ep", "dp", "dp_cp", "intra_dp_cp", "inter_dist_opt")
    named = [(n, getattr(groups.collection, n, None)) for n in (*dense, "tp_cp", "expt_dp", "tp_ep", "tp_ep_pp", "mp")]
    named += zip(("cp_heads", "cp_ring"), getattr(groups.collection, "hcp", None) or ())
    for name, group in named:
        if group is not None:
            names.setdefault(tuple(dist.get_process_group_ranks(group)), name)
    names.setdefault(tuple(range(groups.world_size)), "world")
    return names


def _sent(kind: str, args: Any, group: Any) -> int:
    """Return the bytes that a rank sends to other ranks of a group."""
    size = group.size()
    input_bytes = sum(x.nbytes for x in tree_iter(args[1]) if isinstance(x, Tensor))
    output_bytes = sum(x.nbytes for x in tree_iter(args[0]) if isinstance(x, Tensor))
    if kind == "all_to_all":
        shares = args[4]  # rows for each rank; empty if all are equal
        return args[1][:1].nbytes * (sum(shares) - shares[group.rank()]) if shares else input_bytes * (size - 1) // size
    if kind == "all_gather":
        return input_bytes * (size - 1)
    if kind == "reduce_scatter":
        return input_bytes * (size - 1) // size
    if kind == "all_reduce":
        return 2 * output_bytes * (size - 1) // size  # a ring: each byte travels around twice, minus one step
    return output_bytes  # to one rank, or along a chain


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return FLOP formulas by operation: torch's, with replacements for attention and gradients of convolutions.

    torch's formulas for packed attention loop over segments, and torch 2.11 has none for varlen. Its formula for the
    weight gradient of a convolution counts all pairs of channels, also in groups.
    """
    from torch.nn.attention import varlen  # noqa: F401  registers its operators
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

    aten, attention = torch.ops.aten, torch.ops.torch_attn

    def of_shapes(formula: Callable[..., int]) -> Callable[..., int]:
        return lambda *args, **_: formula(*(x.shape for x in args if isinstance(x, Tensor)))

    return {
        **flop_registry,
        aten._flash_attention_forward: _packed_forward,
        aten._flash_attention_backward: _packed_backward,
        aten.convolution_backward: _convolution_backward,
        attention._varlen_attn: _packed_forward,
        attention._varlen_attn_backward: _packed_backward,
        aten._scaled_dot_product_flash_attention_for_cpu: of_shapes(sdpa_flop),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: of_shapes(sdpa_backward_flop),
    }


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any, out_val: Any, **_: Any) -> int:
    """Count the gradients of input and weight, each with as many operations as the forward pass."""
    from torch.utils.flop_counter import conv_flop_count

    is_transposed, needed = args[4], args[-1]
    return sum(needed[:2]) * conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), is_transposed)


def _packed_forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **_: Any) -> int:
    """Count q k^T and p v; the next arguments are cu_seqlens and max_seqlen of queries and keys."""
    return 2 * query.shape[1] * _pairs(*args[:4]) * (key.shape[2] + value.shape[2])


def _packed_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **_: Any) -> int:
    """Count q k^T again and the gradients of p, q, k and v; out and lse precede the segments."""
    return 2 * query.shape[1] * _pairs(*args[2:6]) * (3 * key.shape[2] + 2 * value.shape[2])


def _bytes_of_sums(_grad: Tensor, query: Tensor, *args: Any) -> int:
    """Return the memory of the float32 sums of dq inside a backward pass of FlashAttention, for half precision."""
    if query.element_size() > 2:
        return 0
    if query.dim() == 4:  # of segments of equal length
        segments, heads, queries, features = query.shape
        return 4 * segments * count_sums(heads, queries, features)
    tokens, heads, features = query.shape
    return 4 * count_sums(heads, tokens, features, len(args[4]) - 1)


def _pairs(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> int:
    """Return the number of query-key pairs in segments; uses the longest segment if lengths have no values."""
    if META in (cu_seqlens_q.device, cu_seqlens_k.device):
        return (len(cu_seqlens_q) - 1) * max_seqlen_q * max_seqlen_k
    return int((cu_seqlens_q.diff().long() * cu_seqlens_k.diff()).sum())


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """List the tensors among arguments, including those in lists."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors
