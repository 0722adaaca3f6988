"""Input and output of a token stack: sequence-parallel split and gather, patch embedding, pipeline activations.

Under sequence parallelism with 2 tensor-parallel ranks (T local tokens of the context-parallel rank):

    tokens 0 ... T-1 --shard_tokens--> rank 0: 0 ... T/2-1, rank 1: T/2 ... T-1 --unshard_tokens--> 0 ... T-1
"""

from dataclasses import replace
from typing import Optional

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dit.backends.init import normal, xavier_uniform
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import CONTROL
from dit.joint_layout import JointLayout, joint_layout
from dit.layout import SequenceLayout


def shard_tokens(
    layout: SequenceLayout, provider: LayerProvider, *tensors_T: Tensor
) -> tuple[SequenceLayout, tuple[Tensor, ...]]:
    """Split the local tokens over tensor-parallel ranks under sequence parallelism; otherwise return all of them.

    Returns:
        The layout of this rank's shard, and the shard of each tensor.
    """
    if not provider.sequence_parallel:
        return layout, tensors_T
    rank, count = provider.tp_rank, layout.num_local_tokens // provider.tp_size
    part = slice(rank * count, (rank + 1) * count)
    return layout.shard(rank, provider.tp_size), tuple(x[part] for x in tensors_T)


def pad_tokens(layout: SequenceLayout, provider: LayerProvider) -> SequenceLayout:
    """Add the tail pad that makes the number of tokens a multiple of `LayerProvider.token_multiple`.

    The result is another layout also if no pad is needed: `dit.pack_copy.compute_tables` repeats the tables of this
    pack for the next one, whose texts may need a pad before ranks share them.
    """
    multiple = provider.token_multiple
    return layout if multiple == 1 else layout.table(_padded, multiple)


def unshard_tokens(x_TD: Tensor, provider: LayerProvider, *, is_output: bool = False) -> Tensor:
    """Gather the shards of `shard_tokens`: `[T / tp, D]` becomes `[T, D]`.

    Inside the network, the ranks compute different functions of the gathered tokens, so the backward pass sums their
    gradients. At its output, every tensor-parallel rank computes the same loss from all tokens, so the backward pass
    selects the gradient of this rank's tokens.
    """
    if not provider.sequence_parallel:
        return x_TD
    group = provider.tp_group
    return gather_from_sequence_parallel_region(x_TD, tensor_parallel_output_grad=not is_output, group=group)


def gather_from_ranks(x_T: Tensor, group: ProcessGroup) -> Tensor:
    """Gather the local tokens of the ranks of a group, rank by rank; the backward pass sums their gradients."""
    return gather_from_sequence_parallel_region(x_T, group=group)


def to_next_stage(x_TD: Tensor) -> Tensor:
    """Return the activations in the shape of Megatron-Core's schedules, `[T, 1, D]`.

    The result is not a view, because the schedules free its storage after sending.
    """
    return make_viewless_tensor(x_TD[:, None], x_TD.requires_grad, keep_graph=True)


def from_previous_stage(received_T1D: Optional[Tensor]) -> Tensor:
    """Return received activations as `[T, D]`, the inverse of `to_next_stage`."""
    assert received_T1D is not None
    return received_T1D.flatten(0, 1)


def with_control(inputs_TC: Tensor, batch: PackedBatch, features: int) -> Tensor:
    """Return the inputs of a network with `features` per token: latents, and the control pictures if it reads them."""
    if inputs_TC.shape[1] == features:
        return inputs_TC
    return torch.cat([inputs_TC, batch.conditions[CONTROL.name].values.to(inputs_TC.dtype)], 1)


def embed_patches(linear: nn.Linear, inputs_TC: Tensor, layout: SequenceLayout) -> Tensor:
    """Apply a linear layer to every patch, with zero inputs for padding: `[T, C]` becomes `[T, D]`."""
    if layout.has_padding:
        # The gradient of padding is 0, but a NaN in padding would reach the weights' gradients as 0 * NaN.
        inputs_TC = inputs_TC.masked_fill(~layout.valid_T[:, None], 0.0)
    return linear(inputs_TC.to(linear.weight.dtype))


class PatchEmbedding(nn.Module):
    """A linear layer applied to every patch, replicated over tensor-parallel ranks."""

    def __init__(self, token_channels: int, hidden_size: int, provider: LayerProvider, *, bias: bool = True) -> None:
        super().__init__()
        init = xavier_uniform(token_channels, hidden_size)
        self.linear = provider.replicated_linear(token_channels, hidden_size, bias=bias, init=init)

    def forward(self, inputs_TC: Tensor, layout: SequenceLayout) -> Tensor:
        return embed_patches(self.linear, inputs_TC, layout)


def with_leading(batch: PackedBatch, count: int, provider: LayerProvider) -> tuple[PackedBatch, JointLayout]:
    """Return the batch with layout and positions of `count` tokens at position 0 before each sample, and that layout.

    Under context parallelism they are replicated, like the text of a `JointLayout`.
    """
    leading = pad_tokens(batch.layout.table(_leading_layout, count), provider)
    joint = joint_layout(leading, batch.layout)
    zeros_K3 = batch.positions_T3.new_zeros(leading.total_tokens, 3)
    return replace(batch, layout=joint, positions_T3=joint.join(zeros_K3, batch.positions_T3)), joint


def last_leading(rows_KD: Tensor, joint: JointLayout) -> Tensor:
    """Return the last leading token of each sample, `[S, D]`, from all leading tokens `[K, D]`."""
    samples, count = joint.text.num_samples, joint.text.lengths[0]
    return rows_KD[: samples * count].unflatten(0, (samples, count))[:, -1]


class ClassTokens(nn.Module):
    """Tokens of the class before those of each sample: the embedding of the class plus a learned vector each.

    Two class tokens c, d of the samples a and b:

        layers before the first layer with class tokens   a0 a1 a2 b0 b1
        this layer and later ones                         ca da a0 a1 a2 cb db b0 b1

    Pipeline stages always send equally many rows: those before the class tokens send zeros after their tokens.

    Args:
        received: whether the stage receives the class tokens.
        inserted: whether they begin in this stage.
        others: number of tokens, 0 or 1, that precede those of each sample in all layers; it follows the class tokens.

    Source: Li and He 2025 (JiT), arXiv:2511.13720, appendix A.
    """

    def __init__(
        self, count: int, hidden_size: int, provider: LayerProvider, *, received: bool, inserted: bool, others: int = 0
    ) -> None:
        super().__init__()
        self.count, self.provider, self.is_received = count + others, provider, received
        self.vectors = provider.parameter((count, hidden_size), normal(0.02)) if inserted else None

    def of_previous_stage(self, x_TD: Tensor, layout: SequenceLayout) -> Tensor:
        """Return received activations without the rows of class tokens that begin later."""
        return x_TD if self.is_received else x_TD[: layout.num_local_tokens]

    def forward(
        self, x_TD: Tensor, joint: JointLayout, label_SD: Tensor, earlier: Optional[JointLayout] = None
    ) -> Tensor:
        """Insert the class tokens before the local tokens if they begin in this stage, or later the rows of zeros.

        Args:
            joint: layout of the batch with `count` leading tokens.
            label_SD: embedding of the class of each sample.
            earlier: layout of all tokens of `x_TD` and of `others`; None without `others`.
        """
        if self.vectors is None:
            share = self.provider.tp_size if self.provider.sequence_parallel else 1
            return nn.functional.pad(x_TD, (0, 0, 0, joint.total_tokens // share - len(x_TD)))
        rows_SND = label_SD[:, None] + self.vectors
        x_TD = unshard_tokens(x_TD, self.provider)
        if earlier is not None:
            others_KD, x_TD = earlier.split(x_TD)
            rows_SND = torch.cat([rows_SND, last_leading(others_KD, earlier)[:, None]], 1)
        rows_KD = rows_SND.flatten(0, 1)
        rows_KD = nn.functional.pad(rows_KD, (0, 0, 0, joint.text.total_tokens - len(rows_KD)))
        return shard_tokens(joint, self.provider, joint.join(rows_KD, x_TD))[1][0]


def _padded(layout: SequenceLayout, multiple: int) -> SequenceLayout:
    return replace(layout, total_tokens=layout.total_tokens + -layout.total_tokens % multiple)


def _leading_layout(layout: SequenceLayout, count: int) -> SequenceLayout:
    lengths = (count,) * layout.num_samples
    return SequenceLayout(lengths, lengths, sum(lengths), layout.device, is_fixed=layout.is_fixed)
