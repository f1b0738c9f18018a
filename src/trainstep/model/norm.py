"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, eq. 4).

    Computed in float32 (float64 for float64 inputs) and returned in the input's dtype, also under autocast:
    the sum of squares of half-precision values overflows or loses its small terms.

    Attributes:
        weight: [width], starts at one.
    """

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gains to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., width]; same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # pow, not x * x: autograd then saves x once for the square.
        inverse_rms = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return (wide * inverse_rms * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"width={self.width}, eps={self.eps}"
