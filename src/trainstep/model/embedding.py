"""Token embedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainstep.model.init import truncated_normal_


class Embedding(nn.Module):
    """A vector for each token id.

    Attributes:
        weight: [vocab_size, d_model]; starts as N(0, 1) cut at 3.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights (again)."""
        truncated_normal_(self.weight, 1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens [...] (int64 or int32); gives [..., d_model] in the weight's dtype."""
        return functional.embedding(tokens, self.weight)

    def extra_repr(self) -> str:
        return f"vocab_size={self.vocab_size}, d_model={self.d_model}"
