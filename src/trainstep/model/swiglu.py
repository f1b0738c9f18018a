"""The gated feed-forward sublayer."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainstep.model.linear import Linear, PackedLinear


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) * W_up x), silu(z) = z * sigmoid(z) (Shazeer 2020, eq. 6).

    Attributes:
        gate, up: D -> F; with `fused_projections` one packed `gate_up` instead.
        down: F -> D.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        fused_projections: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fused_projections = fused_projections
        if fused_projections:
            self.gate_up = PackedLinear(d_model, (d_ff, d_ff), device=device, dtype=dtype)
        else:
            self.gate = Linear(d_model, d_ff, device=device, dtype=dtype)
            self.up = Linear(d_model, d_ff, device=device, dtype=dtype)
        self.down = Linear(d_ff, d_model, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., D] to [..., D]."""
        gate, up = self.gate_up(x) if self.fused_projections else (self.gate(x), self.up(x))
        return self.down(functional.silu(gate) * up)
