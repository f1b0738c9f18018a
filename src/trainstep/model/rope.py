"""Rotary position embedding."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def rotary_tables(head_dim: int, context_length: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of m * theta^(-2i / H) for positions m and pairs i, each [context_length, H / 2] float32.

    Angles are taken in float64: at position 32,767 a float32 angle is off by 2e-3 radians.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu")
    frequencies = theta ** (-pairs / head_dim)
    positions = torch.arange(context_length, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, frequencies)
    return angles.cos().float(), angles.sin().float()


class RotaryEmbedding(nn.Module):
    """Rotates the pairs (2i, 2i + 1) of a head by m * theta^(-2i / H) at position m (Su et al. 2021, eq. 34).

    The inner product of a rotated query and a rotated key depends on their positions through the difference
    only. cos and sin are cached for `context_length` positions as non-persistent float32 buffers, which stay
    float32 when the model is cast and are made anew when it moves (also from the meta device). The rotation
    is computed in float32 and returned in the input's dtype, also under autocast.

    Raises:
        ValueError: the head width is odd.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        context_length: int,
        theta: float = 10_000.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head width {head_dim} is odd; RoPE rotates pairs")
        self.head_dim = head_dim
        self.context_length = context_length
        self.theta = theta
        # The default device is the one `torch.device(...)` contexts ask for, as for any parameter.
        self._fill_tables(torch.get_default_device() if device is None else torch.device(device))

    def _fill_tables(self, device: torch.device) -> None:
        cos, sin = rotary_tables(self.head_dim, self.context_length, self.theta)
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        # Every cast and move of a module passes here. A cast would round the tables and `to_empty` would
        # leave them unset, so what `fn` made of them only tells the device.
        super()._apply(fn, recurse)
        self._fill_tables(self.cos.device)
        return self

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate queries or keys.

        Args:
            x: [B, N, S, H].
            positions: integers [S], or [B, S] for positions of each sequence; None means 0 .. S-1.

        Returns:
            [B, N, S, H] in x's dtype.

        Raises:
            ValueError: the sequence is longer than the cached tables, or positions have another shape.
            IndexError: an explicit position is outside the tables (on CUDA: a device-side assertion).
        """
        length = x.shape[-2]
        if positions is None:
            if length > self.context_length:
                raise ValueError(
                    f"sequence of {length} tokens is longer than the context length {self.context_length}"
                )
            cos, sin = self.cos[:length], self.sin[:length]
        else:
            allowed = ((length,), (x.shape[0], length))
            if positions.shape not in allowed:
                raise ValueError(
                    f"positions must have shape {allowed[0]} or {allowed[1]}, got {tuple(positions.shape)}"
                )
            cos, sin = self.cos[positions], self.sin[positions]
            if positions.dim() == 2:  # [B, S, H/2] -> [B, 1, S, H/2]: the same for every head
                cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        even, odd = wide[..., 0::2], wide[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return rotated.flatten(-2).to(x.dtype)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, context_length={self.context_length}, theta={self.theta}"
