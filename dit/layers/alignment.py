"""The projection of hidden states to the features of a teacher."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, silu

from dit.backends.init import xavier_uniform
from dit.backends.provider import LayerProvider


class AlignmentHead(nn.Module):
    """Three linear layers with SiLU, replicated over tensor-parallel ranks; each rank projects its tokens.

    Source: Yu et al. 2024 (REPA), arXiv:2410.06940, and `build_mlp` of its published code.
    """

    def __init__(self, size: int, inner: int, features: int, provider: LayerProvider) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (
            provider.replicated_linear(a, b, bias=True, init=xavier_uniform(a, b))
            for a, b in ((size, inner), (inner, inner), (inner, features))
        )

    def forward(self, x_TD: Tensor, features_TF: Tensor) -> Tensor:
        """Return minus the cosine between projection and features of each local token, float32 `[T, 1]`."""
        projected_TF = self.fc3(silu(self.fc2(silu(self.fc1(x_TD)))))
        return -cosine_similarity(projected_TF.float(), features_TF.float(), dim=1)[:, None]


def with_columns(x_TD: Tensor, columns_T1: list[Tensor]) -> Tensor:
    """Append columns, in the dtype of the tokens; pipeline stages send them with the activations."""
    return torch.cat([x_TD, *(column_T1.to(x_TD.dtype) for column_T1 in columns_T1)], 1) if columns_T1 else x_TD
