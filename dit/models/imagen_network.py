"""Common base of Imagen's two UNets: conditioning, and conversion of packs to pictures and back."""

import math
from abc import abstractmethod
from functools import partial
from typing import Optional

import torch
from torch import Tensor, nn

from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.condition_table import AUGMENTATION, LABEL, LOW_RESOLUTION
from dit.errors import BatchError
from dit.kernels.attention import Attention
from dit.kernels.stable_attention import stable_attention
from dit.layers.caption import Caption
from dit.layers.convolution import Convolution, as_pictures, as_tokens, torch_init
from dit.layers.dropout import Dropout
from dit.layers.embeddings import LabelEmbedder, TimestepEmbedder
from dit.layers.picture_blocks import AttentionBlock, BlockConditions, ConditionedBranch
from dit.models.base import Backbone, Stage
from dit.models.imagen_config import ImagenConfig


class ImagenBlock(nn.Module):
    """A conditioned branch plus a shortcut, which is a projection if the number of channels changes.

    Args:
        scaled: always project the input, and divide it by sqrt(2) (Efficient UNet).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        config: ImagenConfig,
        provider: LayerProvider,
        *,
        dropout: Optional[Dropout] = None,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        sizes = inputs, outputs, config.vector_size, config.norm_num_groups
        self.branch, self.scaled = ConditionedBranch(*sizes, provider, dropout=dropout), scaled
        projects = scaled or inputs != outputs
        self.shortcut = Convolution(inputs, outputs, provider, size=1) if projects else None

    def forward(self, x_NCHW: Tensor, vector_NE: Tensor, dropout_N: Optional[Tensor] = None) -> Tensor:
        y_NCHW = self.branch(x_NCHW, vector_NE, dropout_N)
        x_NCHW = x_NCHW if self.shortcut is None else self.shortcut(x_NCHW)
        return y_NCHW + (x_NCHW * math.sqrt(0.5) if self.scaled else x_NCHW)


class ImagenNetwork(Backbone):
    """A UNet on pixels. The conditioning vector sums time, text, class and noise level of the low-resolution picture.

    Args:
        condition_size: width of the text tokens for attention.
    """

    fsdp_units = (ImagenBlock, AttentionBlock)
    compiled_units = (ImagenBlock,)

    def __init__(
        self, config: ImagenConfig, condition_size: int, provider: LayerProvider, attention: Attention, stage: Stage
    ) -> None:
        super().__init__(stage)
        self.config = provider.config
        self.attention = stable_attention if config.stable_attention else attention
        self.side_multiple = config.side_multiple
        self.attends_to_text = config.attention_type != "self"
        size, features = config.vector_size, config.hidden_size
        inits = torch_init(features), torch_init(size)
        embedder = partial(TimestepEmbedder, size, provider, time_scale=1.0, features=features, inits=inits)
        self.time = embedder()
        self.augmentation = embedder() if config.noise_augmentation else None
        self.caption = None
        if config.context_size is not None:
            groups = config.norm_num_groups if self.attends_to_text else None
            self.caption = Caption(config.context_size, condition_size, size, provider, groups=groups)
        self.label = None if config.num_classes is None else LabelEmbedder(config.num_classes, size, provider)
        self.reads_low_resolution = config.low_resolution_factor is not None
        inputs = config.token_channels * (2 if self.reads_low_resolution else 1)
        self.first = Convolution(inputs, config.channels[0], provider)

    def forward(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        t, height, width = batch.grids[0]
        if t != 1 or height % self.side_multiple or width % self.side_multiple:
            raise BatchError(
                f"this UNet requires pictures whose sides are multiples of {self.side_multiple} (2 to the power of its "
                f"levels minus 1), got {t} x {height} x {width} tokens (t x h x w); change the data or the levels"
            )
        if self.reads_low_resolution:
            inputs_TC = torch.cat([inputs_TC, batch.conditions[LOW_RESOLUTION.name].values], 1)
        x_NCHW = as_pictures(inputs_TC.to(self.first.weight.dtype), batch)
        return as_tokens(self.predict(self.first(x_NCHW), self._conditions(time_S, batch)), batch)

    def _conditions(self, time_S: Tensor, batch: PackedBatch) -> BlockConditions:
        vector_SE, context_KD, texts = self.time(time_S), None, None
        if self.augmentation is not None:
            vector_SE = vector_SE + self.augmentation(batch.conditions[AUGMENTATION.name].values.log() / 4)
        if self.caption is not None:
            context_KD, texts, text_SE = self.caption(batch)
            vector_SE = vector_SE + text_SE
            if not self.attends_to_text:
                # The published sizes include the projection of the tokens even if attention ignores them. Its gradient
                # must be zero, not missing, because overlapped reductions wait for every parameter.
                vector_SE = vector_SE + 0.0 * context_KD.sum()
        if self.label is not None:
            vector_SE = vector_SE + self.label(batch.conditions[LABEL.name].values)
        return BlockConditions(vector_SE, context_KD, texts, batch.draw_keys_S)

    @abstractmethod
    def predict(self, x_NCHW: Tensor, conditions: BlockConditions) -> Tensor:
        """Return the prediction `[N, token_channels, H, W]` from the first convolution's output."""
