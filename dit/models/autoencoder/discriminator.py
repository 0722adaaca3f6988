"""The discriminator of an autoencoder's reconstructions."""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, relu

from dit.auxiliary import PatchGAN
from dit.backends.init import normal
from dit.backends.provider import LayerProvider
from dit.errors import BatchError
from dit.layers.convolution import Convolution, GroupNorm
from dit.models.autoencoder.layer import to_pictures

MAX_GROUPS = 32
NEGATIVE_SLOPE = 0.2
INIT = normal(0.02)


def _normed_convolution(inputs: int, outputs: int, stride: int, provider: LayerProvider) -> nn.Sequential:
    convolution = Convolution(inputs, outputs, provider, size=4, stride=stride, bias=False, init=INIT)
    norm = GroupNorm(outputs, math.gcd(outputs, MAX_GROUPS), provider)
    return nn.Sequential(OrderedDict(convolution=convolution, norm=norm))


class Discriminator(nn.Module):
    """PatchGAN: scores overlapping patches of a picture, high for patches of real pictures.

        4x4 / 2 --> num_layers - 1 times: 4x4 / 2, norm --> 4x4, norm --> 4x4 to one score per patch

    Leaky ReLUs follow all convolutions but the last. The last two have a stride of 1, which makes
    the picture one pixel smaller.

    Source: Isola et al. 2017, arXiv:1611.07004, appendix 6.1.2. Deviations: group norms instead of batch norms, whose
    statistics would depend on the micro-batch; no bias of the scores, because its gradient is zero while all scores are
    between -1 and 1.
    """

    def __init__(self, channels: int, token_side: int, sizes: PatchGAN, provider: LayerProvider) -> None:
        super().__init__()
        self.token_side, self.smallest = token_side, sizes.smallest_side
        (_, width, stride), *normed, (last_width, scores, _) = sizes.convolutions(channels)
        self.first = Convolution(channels, width, provider, size=4, stride=stride, init=INIT)
        self.layers = nn.ModuleList(_normed_convolution(*convolution, provider) for convolution in normed)
        self.last = Convolution(last_width, scores, provider, size=4, bias=False, init=INIT)

    def forward(self, x_SthwC: Tensor, y_SthwC: Tensor) -> Tensor:
        """Compare each sample x with its reconstruction y; D(.) is the mean score of all patches of a sample.

        D(y) is computed once. Linearised at y, it has the value and the gradient of D'(y), where D' has constant
        parameters.

        Returns:
            Three columns `[S, 3]`, float32: -D'(y); 1/2 mean max(0, 1 - D(x)) + 1/2 mean max(0, 1 + D(y)) with a
            constant y; and |d D'(y) / d y|, a constant.
        """
        with torch.enable_grad():  # validation needs the slope, too
            constant_SthwC = y_SthwC.detach().requires_grad_()
            real_SP, fake_SP = self.scores(x_SthwC), self.scores(constant_SthwC)
            # The sum, not the mean, so that gradients in fp16 do not underflow.
            (sum_slope_SthwC,) = torch.autograd.grad(fake_SP.sum(), constant_SthwC, retain_graph=True)
        slope_SthwC = -sum_slope_SthwC / fake_SP.shape[1]
        change_S = ((y_SthwC - constant_SthwC.detach()) * slope_SthwC).flatten(1).sum(1)  # 0, with a gradient
        hinge_S = (relu(1 - real_SP).mean(1) + relu(1 + fake_SP).mean(1)) / 2
        return torch.stack([change_S - fake_SP.detach().mean(1), hinge_S, slope_SthwC.flatten(1).norm(dim=1)], 1)

    def scores(self, tokens_SthwC: Tensor) -> Tensor:
        """Return the scores of all patches of each sample, float32 `[S, P]`; see `forward`."""
        x_NCHW = to_pictures(tokens_SthwC.flatten(0, 1), self.token_side)
        height, width = x_NCHW.shape[2:]
        if min(height, width) < self.smallest:
            raise BatchError(
                f"pictures of {height} x {width} pixels are too small for the discriminator, which needs sides of at "
                f"least {self.smallest}; use larger pictures, a smaller objective.adversarial.num_layers, or "
                "objective.adversarial=none"
            )
        x_NCHW = leaky_relu(self.first(x_NCHW.to(self.first.weight.dtype)), NEGATIVE_SLOPE)
        for layer in self.layers:
            x_NCHW = leaky_relu(layer(x_NCHW), NEGATIVE_SLOPE)
        return self.last(x_NCHW).float().view(len(tokens_SthwC), -1)
