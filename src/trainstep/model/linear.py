"""Linear maps without bias, alone and packed."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainstep.model.init import linear_std, truncated_normal_


class Linear(nn.Module):
    """y = x W^T without bias.

    Attributes:
        weight: [d_out, d_in]; starts as N(0, 2 / (d_in + d_out)) cut at 3 standard deviations.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_in = d_in
        self.d_out = d_out
        self.weight = nn.Parameter(torch.empty(d_out, d_in, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights (again)."""
        truncated_normal_(self.weight, linear_std(self.d_in, self.d_out))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., d_in] to [..., d_out]."""
        return functional.linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"d_in={self.d_in}, d_out={self.d_out}"


class PackedLinear(nn.Module):
    """Several linear maps of the same input as one matrix product: y_i = x W_i^T.

    One large product keeps a GPU busier than several small ones and reads x once. Each part is drawn with its
    own standard deviation and in order, so equal seeds give the same weights as separate `Linear`s made in
    that order.

    Attributes:
        weight: [sum(d_outs), d_in], the parts' weights stacked.
    """

    def __init__(
        self,
        d_in: int,
        d_outs: Sequence[int],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_in = d_in
        self.d_outs = tuple(d_outs)
        self.weight = nn.Parameter(torch.empty(sum(self.d_outs), d_in, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights (again), part by part."""
        for part, d_out in zip(self.weight.detach().split(self.d_outs), self.d_outs, strict=True):
            truncated_normal_(part, linear_std(self.d_in, d_out))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map x [..., d_in] to one [..., d_out] for each part; the results are views of one tensor."""
        return functional.linear(x, self.weight).split(self.d_outs, dim=-1)

    def extra_repr(self) -> str:
        return f"d_in={self.d_in}, d_outs={self.d_outs}"
