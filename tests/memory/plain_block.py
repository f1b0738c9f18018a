"""The plain block that the known answers were counted on: materialised scores, separate projections, no
biases.

Written as a course's student writes it: every operation its own line of PyTorch, softmax from `max`, `exp`
and `sum`.
"""

import math

import torch
from torch import nn


class PlainLinear(nn.Module):
    def __init__(self, d_in, d_out, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in, device=device) / math.sqrt(d_in))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class PlainRMSNorm(nn.Module):
    def __init__(self, d_model, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model, device=device))

    def forward(self, x):
        reciprocal = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x * reciprocal * self.weight


class PlainRoPE(nn.Module):
    def __init__(self, length, head_dim, device=None):
        super().__init__()
        frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
        angles = torch.arange(length, device=device)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x, positions):
        cos, sin = self.cos[positions], self.sin[positions]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((cos * even - sin * odd, sin * even + cos * odd), dim=-1).flatten(-2)


class PlainAttention(nn.Module):
    def __init__(self, d_model, n_heads, length, device=None):
        super().__init__()
        self.heads = (n_heads, d_model // n_heads)
        self.q, self.k, self.v, self.out = (PlainLinear(d_model, d_model, device) for _ in range(4))
        self.rope = PlainRoPE(length, self.heads[1], device)

    def forward(self, x, positions):
        q, k, v = (
            project(x).unflatten(-1, self.heads).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        q, k = self.rope(q, positions), self.rope(k, positions)
        scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(self.heads[1])
        index = torch.arange(x.shape[-2], device=x.device)
        scores = scores.masked_fill(index[:, None] < index, float("-inf"))
        exponentials = torch.exp(scores - scores.max(-1, keepdim=True).values)
        weights = exponentials / exponentials.sum(-1, keepdim=True)
        return self.out(torch.einsum("...qk,...kd->...qd", weights, v).transpose(1, 2).flatten(-2))


class PlainSwiGLU(nn.Module):
    def __init__(self, d_model, d_ff, device=None):
        super().__init__()
        self.gate, self.up = PlainLinear(d_model, d_ff, device), PlainLinear(d_model, d_ff, device)
        self.down = PlainLinear(d_ff, d_model, device)

    def forward(self, x):
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class PlainBlock(nn.Module):
    """One pre-norm block; `dropout` follows both halves."""

    def __init__(self, d_model, d_ff, n_heads, length, device=None, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = PlainRMSNorm(d_model, device), PlainRMSNorm(d_model, device)
        self.attention = PlainAttention(d_model, n_heads, length, device)
        self.feed_forward = PlainSwiGLU(d_model, d_ff, device)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, positions):
        x = x + self.dropout(self.attention(self.norm1(x), positions))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


def plain_blocks(n_blocks, *, d_model=32, n_heads=4, length=16, device="cpu", dropout=0.0):
    """A few small blocks and the positions they take."""
    blocks = nn.ModuleList(
        PlainBlock(d_model, 4 * d_model, n_heads, length, device, dropout) for _ in range(n_blocks)
    )
    return blocks, torch.arange(length, device=device)
