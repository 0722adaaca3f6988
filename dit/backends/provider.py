"""The layer provider: parallel linears for the layers, from Megatron-Core or from Transformer Engine.

Layers request a linear by its sharding (split outputs, split inputs, replicated), not by its library.
"""

import math
from copy import copy
from dataclasses import replace
from typing import Any, Optional

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from dit.backends.device import local_device
from dit.backends.expert_dispatch import ExpertDispatch
from dit.backends.gathered_linear import GatheredLinear
from dit.backends.init import ZEROS, Init, uniform, with_init
from dit.backends.linears import ColumnLinear, RowLinear
from dit.backends.overlapped_linears import OverlappedColumnLinear, OverlappedRowLinear
from dit.backends.sharding import (
    ONE_MATRIX,
    GradientCovers,
    ParameterSharding,
    adapter_shardings,
    set_sharding,
    sharding_of,
)
from dit.errors import ConfigError
from dit.kernels.choice import (
    UNTRIED,
    Implementation,
    Op,
    Target,
    capability_from,
    choose,
    installed,
    on_cuda,
    on_symmetric_memory,
)
from dit.kernels.fp8 import BLOCKS, PRODUCTS, TE_CAPABILITY, Fp8Products, check_features
from dit.kernels.layer_kernels import EAGER, LayerKernels
from dit.settings import Fp8

LINEAR_CLASSES = (nn.Linear, ColumnParallelLinear, RowParallelLinear)
"""Classes of the linear layers of a model without Transformer Engine."""
EXPERT = ParameterSharding(expert=True, matrices=ONE_MATRIX)


def _transformer_engine() -> tuple[Any, Any]:
    from dit.backends.te_linears import TEColumnLinear, TERowLinear  # imports the package

    return TEColumnLinear, TERowLinear


LINEARS = Op[tuple[Any, Any]](
    "linears",
    (
        Implementation("transformer_engine", _transformer_engine, (on_cuda, installed("transformer_engine")), UNTRIED),
        Implementation(
            "overlapped", lambda: (OverlappedColumnLinear, OverlappedRowLinear), (on_symmetric_memory,), UNTRIED
        ),
        Implementation("megatron", lambda: (ColumnLinear, RowLinear)),
    ),
    setting="training.linears",
)
"""The classes of column- and row-parallel linears."""


def quantising_linears(fp8: Optional[Fp8]) -> Op[tuple[Any, Any]]:
    """Return `LINEARS` with the compute capability and precision that Transformer Engine needs to quantise products."""
    if fp8 is None:
        return LINEARS
    engine, *others = LINEARS.implementations
    needed = [capability_from(*TE_CAPABILITY[fp8], f"training.fp8={fp8}")]
    if fp8 == "nvfp4":
        needed.append(_bf16)  # for the rotation
    return replace(LINEARS, implementations=(replace(engine, requires=(*engine.requires, *needed)), *others))


def _bf16(target: Target) -> Optional[str]:
    return None if target.dtype == torch.bfloat16 else "needs training.precision=bf16 with training.fp8=nvfp4"


class _OneRank:
    """A group of one rank. Megatron-Core's linears replace None by the process's tensor-parallel group."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class LayerProvider:
    """Builds the parallel layers of a model for one rank.

    Args:
        groups: Megatron-Core's `ProcessGroupCollection`; None builds the full model on one rank (meta device, export).
        linears: name of one of `LINEARS`, or `auto`.
        fp8: scaling of the quantised products of `column_linear`, `heads_linear` and `row_linear`, which build the
            linears of transformer blocks; None for products in the precision of the weights.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: Optional[Any] = None,
        linears: str = "megatron",
        kernels: LayerKernels = EAGER,
        fp8: Optional[Fp8] = None,
    ) -> None:
        self.config, self.kernels = config, kernels
        target = Target(local_device(), config.params_dtype)
        selected = choose(quantising_linears(fp8), target, linears)
        self._column, self._row = selected.load()
        self._token_block = BLOCKS[fp8] if fp8 is not None and selected.name == "transformer_engine" else 1
        self.tp_group = _OneRank() if groups is None else groups.tp
        self.tp_size, self.tp_rank = self.tp_group.size(), self.tp_group.rank()
        self._groups = groups
        self._fp8: Optional[Fp8Products] = None
        if fp8 is not None:
            # The ranks that have parts of the weight, or of the tokens of a micro-batch.
            group = None if groups is None or groups.tp_cp.size() == 1 else groups.tp_cp
            self._fp8 = Fp8Products(fp8, choose(PRODUCTS[fp8], target).load(), group)

    @property
    def _device(self) -> Any:
        """Device of the parameters; None for torch's default device (meta builds)."""
        return None if self.config.use_cpu_initialization else torch.cuda.current_device()

    @property
    def sequence_parallel(self) -> bool:
        return self.config.sequence_parallel and self.tp_size > 1

    @property
    def token_multiple(self) -> int:
        """Number that must divide the tokens of a pack; see `ParallelDims.token_multiple`."""
        return self._token_block * (self.tp_size if self.sequence_parallel else 1)

    @property
    def _skips_bias_add(self) -> bool:
        """Whether a linear that returns its bias leaves the addition to the next operation.

        A fused operation adds it at no cost. Under tensor parallelism the matrix product cannot add it.
        """
        return self.kernels.adds_bias or self.tp_size > 1

    def split(self, count: int, name: str) -> int:
        """Return the number of `count` equal parts that are local to this rank."""
        if count % self.tp_size:
            fits = [n for n in range(1, count + 1) if count % n == 0 and n <= 64]
            raise ConfigError(
                f"{name}={count} cannot be split over tensor_model_parallel_size={self.tp_size}; use one of {fits}"
            )
        return count // self.tp_size

    def _products(self, features: int, *, split: int) -> Optional[Fp8Products]:
        """Return the quantised products of a linear layer; None for products in the precision of the weight."""
        if self._fp8 is None:
            return None
        check_features(self._fp8.kind, features, 1)
        check_features(self._fp8.kind, split, self.tp_size)
        return self._fp8

    def column_linear(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        init: Init,
        replicated_input: bool = False,
        returns_bias: bool = False,
    ) -> ColumnLinear:
        """Build a linear layer whose output features are split.

        Args:
            returns_bias: whether the layer returns a `PendingBias`, which may still have to be added.
            replicated_input: whether the input is replicated over tensor-parallel ranks even under sequence parallelism
                (text). Then no tokens are gathered, and every rank computes the gradient of all tokens. Its products
                are not quantised, because the gradient of a context-parallel rank covers only its own queries.
        """
        self.split(out_features, "output features")
        config, skips = self.config, returns_bias and self._skips_bias_add
        if replicated_input:
            config = copy(config)
            config.sequence_parallel = False
        layer = self._column(
            in_features,
            out_features,
            config=config,
            init_method=None,
            bias=bias,
            gather_output=False,
            skip_bias_add=skips,
            is_expert=False,
            tp_group=self.tp_group,
        )
        covers: GradientCovers = "all_tokens" if replicated_input else "sequence_shard"
        sharding = ParameterSharding(split_dim=0, gradient_covers=covers, matrices=ONE_MATRIX)
        layer.is_unsharded, layer.returns_bias, layer.skip_bias_add = self.tp_size == 1, returns_bias, skips
        layer.fp8 = None if replicated_input else self._products(in_features, split=out_features)
        _initialize(layer, sharding, sharding, init)
        return layer

    def heads_linear(
        self, in_features: int, out_features: int, *, bias: bool, init: Init, replicated_input: bool = False
    ) -> ColumnLinear:
        """Build a projection to attention heads, which returns a `PendingBias` for `split_heads`.

        The matrix product adds the bias. On one tensor-parallel rank, the fused `split_heads` writes the gradient of
        the output and sums the gradient of the bias in the same pass.
        """
        layer = self.column_linear(in_features, out_features, bias=bias, init=init, replicated_input=replicated_input)
        layer.returns_bias = True
        fused_bias = bias and self.kernels.adds_bias and self.tp_size == 1
        layer.skip_bias_gradient = fused_bias and isinstance(layer, ColumnLinear)
        return layer

    def row_linear(
        self, in_features: int, out_features: int, *, bias: bool, init: Init, returns_bias: bool = False
    ) -> RowLinear:
        """Build a linear layer whose input features are split."""
        self.split(in_features, "input features")
        skips = returns_bias and self._skips_bias_add
        layer = self._row(
            in_features,
            out_features,
            config=self.config,
            init_method=None,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=skips,
            is_expert=False,
            tp_group=self.tp_group,
        )
        layer.is_unsharded, layer.returns_bias, layer.skip_bias_add = self.tp_size == 1, returns_bias, skips
        layer.fp8 = self._products(out_features, split=in_features)
        # The bias is added to the local tokens, after the sum over ranks.
        _initialize(layer, ParameterSharding(split_dim=1, matrices=ONE_MATRIX), ParameterSharding(), init)
        return layer

    def replicated_linear(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        init: Init,
        gradient_covers: GradientCovers = "sequence_shard",
    ) -> nn.Linear:
        """Build a linear layer that is replicated over tensor-parallel ranks."""
        layer = nn.Linear(in_features, out_features, bias=bias, dtype=self.config.params_dtype, device=self._device)
        sharding = ParameterSharding(gradient_covers=gradient_covers)
        _initialize(layer, sharding, sharding, init)
        return layer

    def gathered_linear(self, in_features: int, out_features: int, *, bias: bool, init: Init) -> GatheredLinear:
        """Build a linear layer for per-sample values, whose split output features are gathered on every rank."""
        self.split(out_features, "output features")
        layer = GatheredLinear(
            in_features,
            out_features,
            bias=bias,
            group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            dtype=self.config.params_dtype,
            device=self._device,
        )
        sharding = ParameterSharding(split_dim=0)
        _initialize(layer, sharding, sharding, init)
        return layer

    def is_linear(self, module: nn.Module) -> bool:
        return isinstance(module, (nn.Linear, self._column, self._row))

    def adapter(self, layer: nn.Module, rank: int) -> tuple[nn.Module, nn.Module]:
        """Build the linears A and B of a low-rank adapter of a linear layer, sharded by `adapter_shardings`.

        A is initialised uniformly in +-1 / sqrt(in) and B to zero (Hu et al. 2021, arXiv:2106.09685, section 4.1, with
        the uniform distribution of peft).
        """
        weight = layer.get_parameter("weight")
        base = sharding_of(weight)
        out_features, in_features = base.global_shape(weight.shape, self.tp_size)
        a, b = adapter_shardings(base)
        plain = copy(self)
        plain._fp8 = None  # the products of an adapter are small
        down = plain._linear_of(a, in_features, rank, uniform(1 / math.sqrt(in_features)))
        if isinstance(layer, GatheredLinear):
            up = self.gathered_linear(rank, out_features, bias=False, init=ZEROS)
            set_sharding(up.get_parameter("weight"), b)
            return down, up
        return down, plain._linear_of(b, rank, out_features, ZEROS)

    def _linear_of(self, sharding: ParameterSharding, in_features: int, out_features: int, init: Init) -> nn.Module:
        """Build a linear layer without bias whose weight has this sharding."""
        covers = sharding.gradient_covers
        layer: nn.Module
        if sharding.expert:
            layer = self.expert_linear(in_features, out_features, bias=False, init=init)
        elif sharding.split_dim == 0:
            layer = self.column_linear(
                in_features, out_features, bias=False, init=init, replicated_input=covers == "all_tokens"
            )
        elif sharding.split_dim == 1:
            layer = self.row_linear(in_features, out_features, bias=False, init=init)
        else:
            layer = self.replicated_linear(in_features, out_features, bias=False, init=init, gradient_covers=covers)
        set_sharding(layer.get_parameter("weight"), sharding)
        return layer

    def local_experts(self, num_experts: int) -> range:
        """Return the global indices of the local experts."""
        size = 1 if self._groups is None else self._groups.ep.size()
        share = num_experts // size
        first = 0 if self._groups is None else self._groups.ep.rank() * share
        return range(first, first + share)

    def expert_linear(self, in_features: int, out_features: int, *, bias: bool, init: Init) -> nn.Linear:
        """Build an unsharded linear layer of one expert."""
        layer = nn.Linear(in_features, out_features, bias=bias, dtype=self.config.params_dtype, device=self._device)
        _initialize(layer, EXPERT, EXPERT, init)
        return layer

    def expert_dispatch(self, experts: range) -> Optional[ExpertDispatch]:
        """Build the `ExpertDispatch` to the experts of all ranks; return None on the meta device."""
        if self._groups is None:
            return None
        return ExpertDispatch(self.config, self._groups, experts)

    def sum_over_sample_ranks(self, x: Tensor) -> Tensor:
        """Sum a tensor in place over the ranks that have tokens of the same samples; not differentiable."""
        group = None if self._groups is None else self._groups.tp_cp
        if group is not None and group.size() > 1:
            torch.distributed.all_reduce(x, group=group)
        return x

    def sum_over_tensor_ranks(self, x: Tensor) -> Tensor:
        """Sum a tensor over the tensor-parallel ranks, and its gradient in the backward pass."""
        return x if self.tp_size == 1 else _sum_over(x, self.tp_group)

    def sum_gradient_over_tensor_ranks(self, x: Tensor) -> Tensor:
        """Return `x`; the backward pass sums its gradient over the tensor-parallel ranks."""
        return x if self.tp_size == 1 else copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def sum_over_context_ranks(self, x: Tensor) -> Tensor:
        """Sum a tensor over the context-parallel ranks, and its gradient in the backward pass."""
        group = None if self._groups is None else self._groups.cp
        return x if group is None or group.size() == 1 else _sum_over(x, group)

    def split_parameter(self, shape: tuple[int, ...], init: Init) -> nn.Parameter:
        """Build a parameter whose first dimension is split over tensor-parallel ranks."""
        local = (self.split(shape[0], "features"), *shape[1:])
        empty = torch.empty(local, dtype=self.config.params_dtype, device=self._device)
        return with_init(set_sharding(nn.Parameter(empty), ParameterSharding(split_dim=0)), init)

    def parameter(
        self,
        shape: tuple[int, ...],
        init: Init,
        *,
        gradient_covers: GradientCovers = "sequence_shard",
        dtype: Optional[torch.dtype] = None,
    ) -> nn.Parameter:
        """Build a parameter that is replicated over tensor-parallel ranks.

        Args:
            dtype: None for the dtype of the model's weights.
        """
        empty = torch.empty(shape, dtype=dtype or self.config.params_dtype, device=self._device)
        return with_init(set_sharding(nn.Parameter(empty), ParameterSharding(gradient_covers=gradient_covers)), init)


def _sum_over(x: Tensor, group: Any) -> Tensor:
    """Sum a tensor over the ranks of a group, and its gradient in the backward pass."""
    return copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(x, group=group), group=group)


def _initialize(layer: nn.Module, weight: ParameterSharding, bias: ParameterSharding, init: Init) -> None:
    """Set the sharding and the initialisation of a linear layer; biases are initialised to zero."""
    with_init(set_sharding(layer.get_parameter("weight"), weight), init)
    if isinstance(layer.bias, nn.Parameter):
        with_init(set_sharding(layer.bias, replace(bias, matrices=None)), ZEROS)
