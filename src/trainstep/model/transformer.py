"""The decoder-only Transformer language model."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from trainstep.attention.registry import get_attention, load_attention
from trainstep.memory import checkpointing
from trainstep.memory.policy import parse_policy
from trainstep.model.attention import CausalSelfAttention
from trainstep.model.embedding import Embedding
from trainstep.model.linear import Linear
from trainstep.model.norm import RMSNorm
from trainstep.model.rope import RotaryEmbedding
from trainstep.model.swiglu import SwiGLU
from trainstep.specs.dtype import get_dtype
from trainstep.specs.model import ModelConfig


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)) (pre-norm)."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rope: RotaryEmbedding,
        attend: Callable[..., Tensor],
        window: int | None,
        fused_projections: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, device=device, dtype=dtype)
        self.attention = CausalSelfAttention(
            config.d_model,
            config.n_heads,
            config.kv_heads,
            rope=rope,
            attend=attend,
            window=window,
            qk_norm=config.qk_norm,
            fused_projections=fused_projections,
            device=device,
            dtype=dtype,
        )
        self.feed_forward_norm = RMSNorm(config.d_model, device=device, dtype=dtype)
        self.feed_forward = SwiGLU(
            config.d_model, config.d_ff, fused_projections=fused_projections, device=device, dtype=dtype
        )

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map the residual stream x [B, S, D] to [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.feed_forward(self.feed_forward_norm(x))


def layer_window(config: ModelConfig, layer: int) -> int | None:
    """Sliding window of layer `layer`, counted from 0: the last of each `global_every` layers has none."""
    if config.global_every is not None and (layer + 1) % config.global_every == 0:
        return None
    return config.window


class TransformerLM(nn.Module):
    """Decoder-only Transformer language model: embedding, L pre-norm blocks, RMSNorm, output projection.

    No biases. A tied output projection is the embedding's weight, with the embedding's initial distribution.

    Attributes:
        config: the shape it was built from.
        embedding, blocks, norm, head: the parts in order; `blocks` is an nn.ModuleList of TransformerBlock.
        run_blocks: `(blocks, x, positions) -> x`, `memory.checkpointing.run` with the configuration's policy.

    Raises:
        ValueError: an unknown attention implementation or checkpointing policy, or an implementation that
            cannot do what the configuration asks for (grouped-query heads, a window).
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        fused_projections: bool = False,
    ) -> None:
        """Build and initialise.

        Args:
            config: see `specs.model`.
            device: where parameters live, "meta" for shapes alone (then `to_empty` and `reset_parameters`).
            dtype: of the parameters; None takes the configuration's.
            fused_projections: query, key and value as one matrix product, gate and up as another. The same
                function and, from the same seed, the same weights; fewer and larger kernels.
        """
        super().__init__()
        self.config = config
        dtype = getattr(torch, get_dtype(config.dtype).torch_name) if dtype is None else dtype
        parse_policy(config.checkpoint)  # an unknown name is refused here, not in the first step
        self.run_blocks: Callable[..., Tensor] = partial(checkpointing.run, policy=config.checkpoint)
        row = get_attention(config.attention)
        if config.kv_heads != config.n_heads and not row.grouped_query:
            raise ValueError(f"attention implementation {row.name!r} takes no grouped-query heads")
        if config.window is not None and not row.window:
            raise ValueError(f"attention implementation {row.name!r} takes no window")
        attend = load_attention(row)
        rope = RotaryEmbedding(config.head_dim, config.context_length, config.rope_theta, device=device)
        self.embedding = Embedding(config.vocab_size, config.d_model, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                config,
                rope=rope,
                attend=attend,
                window=layer_window(config, layer),
                fused_projections=fused_projections,
                device=device,
                dtype=dtype,
            )
            for layer in range(config.n_layers)
        )
        self.norm = RMSNorm(config.d_model, device=device, dtype=dtype)
        # A tied head is made without storage: its own draw would be thrown away.
        head_device = "meta" if config.tie_embeddings else device
        self.head = Linear(config.d_model, config.vocab_size, device=head_device, dtype=dtype)
        self._tie()

    def _tie(self) -> None:
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TransformerLM":
        # Leaving the meta device makes every parameter anew, module by module, which unties them.
        super()._apply(fn, recurse)
        self._tie()
        return self

    def reset_parameters(self) -> None:
        """Draw every initial weight (again), in the constructor's order."""
        for module in self.modules():
            if module is self or (module is self.head and self.config.tie_embeddings):
                continue
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()

    def hidden_states(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """What the output projection reads: the normalised residual stream [B, S, D] of tokens [B, S]."""
        x = self.run_blocks(self.blocks, self.embedding(tokens), positions)
        return self.norm(x)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: [B, S] int64.
            positions: rotary positions, [S] or [B, S]; None means 0 .. S-1.

        Returns:
            [B, S, V].

        Raises:
            ValueError: the sequence is longer than the configuration's context length (without explicit
                positions).
        """
        return self.head(self.hidden_states(tokens, positions))
