"""The causal self-attention sublayer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainstep.model.linear import Linear, PackedLinear
from trainstep.model.norm import RMSNorm
from trainstep.model.rope import RotaryEmbedding


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention with rotary positions.

    Query head n reads key/value head n // (N / K): K = N is multi-head, K = 1 multi-query, between them
    grouped-query attention (Ainslie et al. 2023). With `qk_norm` queries and keys pass an RMSNorm over the
    head width, one gain vector for all heads, before the rotation.

    Attributes:
        query, key, value: D -> N*H, K*H, K*H; with `fused_projections` one packed `query_key_value` instead.
        output: N*H -> D.
        rope: shared by all blocks of a model.
        attend: `attention(q, k, v, *, causal, window)` of the contract in `attention.registry`.
        window: keys that a query sees, its own included; None sees all before it.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        *,
        rope: RotaryEmbedding,
        attend: Callable[..., Tensor],
        window: int | None = None,
        qk_norm: bool = False,
        fused_projections: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = rope.head_dim
        self.fused_projections = fused_projections
        self.window = window
        self.attend = attend
        self.rope = rope
        q_width, kv_width = n_heads * self.head_dim, n_kv_heads * self.head_dim
        if fused_projections:
            self.query_key_value = PackedLinear(
                d_model, (q_width, kv_width, kv_width), device=device, dtype=dtype
            )
        else:
            self.query = Linear(d_model, q_width, device=device, dtype=dtype)
            self.key = Linear(d_model, kv_width, device=device, dtype=dtype)
            self.value = Linear(d_model, kv_width, device=device, dtype=dtype)
        self.output = Linear(q_width, d_model, device=device, dtype=dtype)
        self.query_norm = RMSNorm(self.head_dim, device=device, dtype=dtype) if qk_norm else nn.Identity()
        self.key_norm = RMSNorm(self.head_dim, device=device, dtype=dtype) if qk_norm else nn.Identity()

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * H] -> [B, heads, S, H], a view."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Attend within each sequence.

        Args:
            x: [B, S, D].
            positions: rotary positions, [S] or [B, S]; the causal mask goes by index, not by these.

        Returns:
            [B, S, D].
        """
        if self.fused_projections:
            query, key, value = self.query_key_value(x)
        else:
            query, key, value = self.query(x), self.key(x), self.value(x)
        q = self.rope(self.query_norm(self._heads(query)), positions)  # [B, N, S, H]
        k = self.rope(self.key_norm(self._heads(key)), positions)  # [B, K, S, H]
        mixed = self.attend(q, k, self._heads(value), causal=True, window=self.window)  # [B, N, S, H]
        return self.output(mixed.transpose(1, 2).flatten(-2))

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, window={self.window}"
