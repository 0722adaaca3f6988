"""Settings of a mixture of experts, for backbones whose layers may have one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Optional

from dit.errors import ConfigError
from dit.layers.routing import expert_capacity
from dit.models.base import TransformerSizes
from dit.models.transformer_config import TransformerModelConfig
from dit.ranges import EXPERTS, NOT_NEGATIVE, POSITIVE, WIDTH, check_unused, ranged

Router = Literal["expert_choice", "top_k"]


@dataclass(kw_only=True)
class ExpertOptions(TransformerModelConfig):
    """A transformer with a mixture of experts in place of the MLP of every layer, if `num_experts` is set.

    Attributes:
        num_experts: experts of each layer; None for a dense MLP.
        moe_ffn_hidden_size: inner width of an expert; that of the MLP if None.
        moe_router: experts select tokens of each sample, or tokens select experts (`top_k`).
        moe_capacity_factor: mean number of experts per token (`expert_choice`).
        moe_top_k, moe_aux_loss_coeff: experts per token, and weight of the balancing loss (`top_k`).
    """

    num_experts: Optional[int] = ranged(None, EXPERTS)
    moe_ffn_hidden_size: Optional[int] = ranged(None, WIDTH)
    moe_router: Router = "expert_choice"
    moe_capacity_factor: float = ranged(2.0, POSITIVE)
    moe_top_k: int = ranged(2, WIDTH)
    moe_aux_loss_coeff: float = ranged(0.01, NOT_NEGATIVE)

    def validate(self) -> None:
        super().validate()
        experts = self.num_experts
        if experts is None:
            names = [name for name in vars(self) if name.startswith("moe_")]
            check_unused("model", self, names, "without experts", "set model.num_experts too")
            return
        used, unused, other = "moe_top_k", ["moe_capacity_factor"], "expert_choice"
        if self.moe_router == "expert_choice":
            used, unused, other = "moe_capacity_factor", ["moe_top_k", "moe_aux_loss_coeff"], "top_k"
        where = f"with model.moe_router={self.moe_router}"
        check_unused("model", self, unused, where, f"use model.moe_router={other}")
        if (count := getattr(self, used)) > experts:
            raise ConfigError(
                f"model.{used}={count} experts per token exceed model.num_experts={experts}; use at most {experts}"
            )

    @property
    def expert_size(self) -> int:
        return self.ffn_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    def megatron_sizes(self) -> TransformerSizes:
        sizes = super().megatron_sizes()
        if self.num_experts is None:
            return sizes
        return replace(
            sizes,
            num_moe_experts=self.num_experts,
            moe_ffn_hidden_size=self.expert_size,
            moe_router_topk=self.moe_top_k,
            moe_router_pre_softmax=True,
            moe_router_dtype="fp32",
            # Tells the dispatcher to count the selected pairs, whose number varies: padding is never selected, and with
            # expert choice the number of experts varies per token.
            moe_expert_capacity_factor=self.moe_capacity_factor,
        )

    def moe_arguments(self) -> dict[str, Any]:
        """Return the sizes and the routing arguments of `dit.layers.moe.MoE`."""
        return {
            "ffn_hidden_size": self.expert_size,
            "num_experts": self.num_experts,
            "router": self.moe_router,
            "capacity_factor": self.moe_capacity_factor,
            "top_k": self.moe_top_k,
            "aux_loss_coeff": self.moe_aux_loss_coeff,
        }

    @property
    def experts_per_token(self) -> float:
        """Mean number of experts that compute a token."""
        return self.moe_top_k if self.moe_router == "top_k" else self.moe_capacity_factor

    def routed_pairs(self, lengths: Sequence[int]) -> int:
        """Count the (token, expert) pairs that one layer computes for samples of these lengths."""
        assert self.num_experts is not None
        if self.moe_router == "top_k":
            return sum(lengths) * self.moe_top_k
        return self.num_experts * sum(expert_capacity(n, self.num_experts, self.moe_capacity_factor) for n in lengths)
