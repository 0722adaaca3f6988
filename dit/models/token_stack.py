"""Forward pass of backbones with one token stream, under sequence and pipeline parallelism.

inputs_TC --shard--> embed --> layer 0 --> layer 1 --> ... --> head --gather--> prediction
             (SP)     first stage   |  or received from / sent to other pipeline stages
                                    +-- layer_inputs: conditioning, text, layout, rotation

With `model.routing`, the middle layers run on some of the tokens. With `model.class_tokens`, the last layers run on
more tokens; with `model.teacher_token_size`, all layers do, and outputs of the teacher's token are copied to all rows
of its sample. With `objective.alignment`, minus the cosine of a layer's tokens and features of a teacher is one more
column of the activations and outputs. With `model.value_residual`, which pipelines do not support, all later layers
receive the attention's values of the first.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Optional, TypeVar

import torch
from torch import Tensor, nn

from dit.auxiliary import Projection
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import CLEAN_TEACHER_TOKEN, LABEL, TEACHER, TEACHER_TOKEN
from dit.joint_layout import JointLayout
from dit.kernels.attention import Attention
from dit.kernels.layer_kernels import PendingResidual
from dit.kernels.rope import Rotation
from dit.layers.conditioner import Conditioner
from dit.layers.heads import AlignmentHead, with_columns
from dit.layers.positions import add_sincos
from dit.layers.tokens import (
    ClassTokens,
    from_previous_stage,
    last_leading,
    shard_tokens,
    to_next_stage,
    unshard_tokens,
    with_control,
    with_leading,
)
from dit.layout import SequenceLayout
from dit.models.base import Backbone, Stage
from dit.models.routing_config import TokenRouted
from dit.models.token_routing import TokenRouting
from dit.models.transformer_config import TransformerModelConfig

Config = TypeVar("Config", bound=TransformerModelConfig)


class TokenStack(Backbone, Generic[Config]):
    """A backbone with one stack of blocks.

    A subclass builds `conditioner`, `embed` (first stage), `layers` (global index to block) and `head` (last stage),
    and returns the other inputs of its blocks from `layer_inputs`.
    """

    conditioner: Conditioner
    embed: nn.Module
    layers: nn.ModuleDict
    head: nn.Module
    aligned_layer: Optional[str] = None
    """Global index of the layer whose tokens are compared with features of a teacher; None if another stage has it."""
    teacher_features = 0
    """Width of the class token of a teacher; 0 without it."""

    def __init__(
        self, config: Config, provider: LayerProvider, stage: Stage, attention: Optional[Attention] = None
    ) -> None:
        super().__init__(stage)
        self.config = provider.config
        self.model_config = config
        self.provider = provider
        self.rotary = config.rotary()
        self.middle, self.routing = range(0), None
        self.class_tokens: Optional[ClassTokens] = None
        self.teacher_token: Optional[nn.Module] = None
        self.value_weights: Optional[nn.Parameter] = None
        if isinstance(config, TokenRouted) and config.routing is not None:
            assert attention is not None
            self.middle = config.middle_layers
            if any(i in self.middle for i in stage.layers):
                self.routing = TokenRouting(config, provider, attention)

    def align(self, projection: Projection, provider: LayerProvider) -> None:
        if projection.layer - 1 in self.stage.layers:
            sizes = self.model_config.hidden_size, projection.hidden_size, projection.features
            self.aligned_layer, self.alignment = str(projection.layer - 1), AlignmentHead(*sizes, provider)

    @abstractmethod
    def layer_inputs(
        self, cond_SD: Tensor, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch
    ) -> tuple[Any, ...]:
        """Return the inputs of every block after the tokens; `positions_T3` are those of the local tokens."""

    def embed_tokens(self, inputs_TC: Tensor, layout: SequenceLayout) -> Tensor:
        """Embed local tokens: `[T, C]` becomes `[T, D]`."""
        return self.embed(inputs_TC, layout)

    def fixed_positions(self, positions_T3: Tensor, layout: SequenceLayout, batch: PackedBatch) -> Tensor:
        """Return the positions of the fixed sine-cosine embedding; a subclass may scale them."""
        return positions_T3

    def head_input(self, cond_SD: Tensor, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Any:
        """Return the second argument of the head, whose first is the tokens and third their layout."""
        return cond_SD

    def rotation(self, batch: PackedBatch) -> Optional[Rotation]:
        """Return the rotation of queries and keys, for the tokens of all tensor-parallel ranks."""
        return None if self.rotary is None else self.rotary(batch.positions_T3)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        inputs_TC = with_control(inputs_TC, batch, self.model_config.input_features)
        layout, (inputs_TC, positions_T3) = shard_tokens(batch.layout, self.provider, inputs_TC, batch.positions_T3)
        cond_SD = self.conditioner(time_S, batch)
        columns_T1: list[Tensor] = []
        if self.pre_process:
            fixed_T3 = self.fixed_positions(positions_T3, layout, batch)
            x_TD = add_sincos(self.embed_tokens(inputs_TC, layout), fixed_T3, self.model_config.position_embedding)
        pack, joint = batch, None
        if self.teacher_features:
            pack, joint = with_leading(batch, 1, self.provider)
            layout, (positions_T3,) = shard_tokens(joint, self.provider, pack.positions_T3)
            if self.teacher_token is not None:
                token_SD = self.teacher_token(batch.conditions[TEACHER_TOKEN.name].values.to(x_TD.dtype))
                x_TD = joint.join(joint.text.per_token(token_SD), unshard_tokens(x_TD, self.provider))
                _, (x_TD,) = shard_tokens(joint, self.provider, x_TD)
        inputs = self.layer_inputs(cond_SD, positions_T3, layout, pack)
        aligned = self.aligned_layer if TEACHER.name in batch.conditions else None
        weights: tuple[Tensor, ...] = ()
        if self.value_weights is not None:
            # A copy: views of a parameter require a gradient even under `no_grad`, which FLOP counters refuse.
            weights = self.provider.sum_gradient_over_tensor_ranks(self.value_weights).clone().split(1)
        if not self.pre_process:
            x_TD, columns_T1 = self._received(layout)

        def run(
            layers: Sequence[str], x_TD: Tensor, inputs: tuple[Any, ...], values_TGH: Optional[Tensor] = None
        ) -> tuple[Tensor, Optional[Tensor]]:
            for i in layers:
                first = () if values_TGH is None else ((values_TGH, weights[int(i) - 1]),)
                out = self.layers[i](x_TD, *inputs, *first)
                is_output = isinstance(out, (Tensor, PendingResidual))
                x_TD, values_TGH = (out, values_TGH) if is_output else out
                if i == aligned:
                    x_TD = PendingResidual.added(x_TD)
                    columns_T1.append(self.alignment(x_TD, self._features(batch, joint)))
            return PendingResidual.added(x_TD), values_TGH

        before, middle, after = self._parts()
        x_TD, values_TGH = run(before, x_TD, inputs)
        if self.routing is not None:

            def run_middle(x_TD: Tensor, routed: PackedBatch, values_TGH: Optional[Tensor]) -> Tensor:
                if routed is pack:
                    return run(middle, x_TD, inputs, values_TGH)[0]
                shorter, (positions_T3,) = shard_tokens(routed.layout, self.provider, routed.positions_T3)
                return run(middle, x_TD, self.layer_inputs(cond_SD, positions_T3, shorter, routed), values_TGH)[0]

            x_TD = self.routing(x_TD, batch, pack, layout, run_middle, values_TGH)
        if self.class_tokens is not None:
            assert self.conditioner.label is not None
            pack, leading = with_leading(batch, self.class_tokens.count, self.provider)
            label_SD = self.conditioner.label(batch.conditions[LABEL.name].values)
            x_TD = self.class_tokens(x_TD, leading, label_SD, joint)
            layout, (positions_T3,) = shard_tokens(leading, self.provider, pack.positions_T3)
            x_TD, _ = run(middle, x_TD, self.layer_inputs(cond_SD, positions_T3, layout, pack))
        x_TD, _ = run(after, x_TD, inputs, values_TGH)
        if not self.post_process:
            return to_next_stage(with_columns(x_TD, columns_T1))
        out_TC = self.head(x_TD, self.head_input(cond_SD, inputs_TC, time_S, batch), layout)
        out_TC = unshard_tokens(with_columns(out_TC, columns_T1), self.provider, is_output=True)
        layout = layout.gathered
        return self._of_samples(out_TC, layout, batch) if isinstance(layout, JointLayout) else out_TC

    def _received(self, layout: SequenceLayout) -> tuple[Tensor, list[Tensor]]:
        x_TD, size = from_previous_stage(self.input_tensor), self.model_config.hidden_size
        columns_T1 = [x_TD[:, size:]] if x_TD.shape[1] > size else []
        if columns_T1:
            x_TD = x_TD[:, :size].contiguous()
        return x_TD if self.class_tokens is None else self.class_tokens.of_previous_stage(x_TD, layout), columns_T1

    def _features(self, batch: PackedBatch, joint: Optional[JointLayout]) -> Tensor:
        """Return the teacher's features of the local tokens, and its clean class tokens."""
        features_TF = batch.conditions[TEACHER.name].values
        if joint is not None:
            token = batch.conditions.get(CLEAN_TEACHER_TOKEN, batch.conditions[TEACHER_TOKEN.name])
            token_SF = token.values.to(features_TF.dtype)
            features_TF = joint.join(joint.text.per_token(token_SF), features_TF)
        return shard_tokens(batch.layout if joint is None else joint, self.provider, features_TF)[1][0]

    def _of_samples(self, out_JC: Tensor, joint: JointLayout, batch: PackedBatch) -> Tensor:
        """Return the rows of the samples' tokens, and copies of each output of a teacher's token."""
        leading_KC, out_TC = joint.split(out_JC)
        if not self.teacher_features:
            return out_TC
        start = self.model_config.output_features
        stop = start + self.teacher_features
        token_TC = batch.layout.per_token(last_leading(leading_KC, joint))
        return torch.cat([out_TC[:, :start], token_TC[:, start:stop], out_TC[:, stop:], token_TC[:, stop:]], 1)

    def _parts(self) -> tuple[list[str], list[str], list[str]]:
        """Return the indices of the local layers before, in and after the middle; all are after it if there is none."""
        start, stop = self.middle.start, self.middle.stop
        parts: tuple[list[str], list[str], list[str]] = ([], [], [])
        for i in self.layers:
            parts[(int(i) >= start) + (int(i) >= stop)].append(i)
        return parts
