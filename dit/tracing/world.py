"""Fake process groups, with which one process acts as one rank of a larger world, and attention without scores."""

import contextlib
from collections.abc import Iterator
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core import optimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from dit.backends.provider import LayerProvider
from dit.kernels import attention
from dit.patches import patches, replaced


@patches(
    "torch 2.11-2.14",
    "torch/testing/_internal/distributed/fake_pg.py; torch/distributed: Backend, all_gather_object, "
    "broadcast_object_list; "
    "megatron/core/optimizer/__init__.py: _get_param_groups",
    why="one process acts as one rank; objects of other ranks are assumed to be equal, but a pipeline stage without "
    "trained weights has the parameter groups of the others, which are empty there",
)
@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Act as one rank of a world without other processes."""
    from torch.testing._internal.distributed import fake_pg

    def all_gather_object(object_list: Any, obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)  # every other rank is assumed to send the same object

    def groups_of_stage(chunks: Any, config: Any, overrides: Any) -> list[dict[str, Any]]:
        empty = {"params": [], "is_expert_parallel": False, "lr_mult": 1.0, "wd_mult": 1.0}
        return param_groups(chunks, config, overrides) or [empty]

    param_groups = optimizer._get_param_groups
    objects = {"all_gather_object": all_gather_object, "broadcast_object_list": lambda *_, **__: None}
    devices = dist.Backend.backend_capability["fake"]
    devices += [] if "meta" in devices else ["meta"]
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=fake_pg.FakeStore())
    try:
        with replaced(optimizer, _get_param_groups=groups_of_stage), replaced(dist, **objects):
            yield
    finally:
        dist.destroy_process_group()


@patches(
    "torch 2.11-2.14",
    "torch/nn/functional.py: scaled_dot_product_attention",
    why="on the meta device, torch selects a kernel that saves the scores",
)
def fused_attention() -> contextlib.AbstractContextManager[None]:
    """Replace torch's attention by a kernel that saves no scores, as on an accelerator."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def sdpa(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Optional[Tensor] = None, *, enable_gqa: bool = False
    ) -> Tensor:
        return kernel(q, k, v, attn_mask=attn_mask)[0]

    return replaced(attention, sdpa=sdpa)


class LocalGroups:
    """Replaces every process group by one of size 1."""

    def __getattr__(self, name: str) -> "LocalGroups":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class LocalDispatch:
    """Dispatches tokens to local experts; only counts matter, because tokens have no values."""

    def send(self, x_TD: Tensor, selected_TE: Tensor, weights_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._home = x_TD
        counts = selected_TE.sum(0)
        total = int(counts.sum())
        return x_TD.new_empty(total, x_TD.shape[1]), weights_TE.new_empty(total), counts

    def collect(self, y_PD: Tensor) -> Tensor:
        return torch.empty_like(self._home)


class LocalProvider(LayerProvider):
    """Builds an unsharded model that one rank can run without values."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, LocalGroups())

    def expert_dispatch(self, experts: range) -> Any:
        return LocalDispatch()
