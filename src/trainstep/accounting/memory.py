"""Bytes of training: state by parameter, saved activations by component, and the sum of both.

Figures are what the tensors hold; the allocator's rounding and the library's workspaces come on top.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

from trainstep.accounting import params
from trainstep.specs.model import ModelConfig

# Bytes a parameter with AdamW (two moments), by how the numbers are kept. "fp32" also describes autocast,
# whose parameters stay float32; its low-precision copies live no longer than a product.
STATE_BYTES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "fp32": MappingProxyType({"parameters": 4, "master": 0, "gradients": 4, "optimizer": 8}),
        "mixed": MappingProxyType({"parameters": 2, "master": 4, "gradients": 4, "optimizer": 8}),
        "bf16": MappingProxyType({"parameters": 2, "master": 0, "gradients": 2, "optimizer": 4}),
    }
)
ATTENTION_KINDS = ("materialised", "flash")


def state_precision(dtype: str) -> str:
    """How the state is kept under a dtype of `specs.dtype`: "bf16" for 16-bit parameters, else "fp32"."""
    return "bf16" if dtype in ("bf16", "fp16") else "fp32"


def training_bytes_per_parameter(precision: str) -> int:
    """Bytes of weight, gradient, master copy and AdamW moments a parameter: fp32 16, mixed 18, bf16 8.

    Raises:
        ValueError: the precision is unknown; the message lists the known ones.
    """
    return sum(_state(precision).values())


def _state(precision: str) -> Mapping[str, int]:
    if precision not in STATE_BYTES:
        raise ValueError(f"unknown precision {precision!r}; known: {', '.join(STATE_BYTES)}")
    return STATE_BYTES[precision]


def training_state_bytes(
    config: ModelConfig, precision: str, *, zero_stage: int = 0, ranks: int = 1
) -> dict[str, float]:
    """Bytes a rank of parameters, master copy, gradients and optimizer state.

    Args:
        zero_stage: what is divided over the ranks (Rajbhandari et al., ZeRO, 2020): 0 nothing, 1 the
            optimizer state and master copy, 2 the gradients too, 3 the parameters too (FSDP). Even division
            is assumed.

    Raises:
        ValueError: an unknown precision, a stage outside 0..3 or no ranks.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO stage must be 0, 1, 2 or 3, got {zero_stage!r}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    sharded_from = {"optimizer": 1, "master": 1, "gradients": 2, "parameters": 3}
    count = params.count(config)
    return {
        part: size * count / (ranks if zero_stage >= sharded_from[part] else 1)
        for part, size in _state(precision).items()
    }


def residual_stream_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Bytes of one [B, S, D] tensor: the residual stream, and all that a checkpointed block keeps."""
    return config.batch_size * config.context_length * config.d_model * element_bytes


def scores_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Bytes of the [B, N, S, S] scores of one layer when they are materialised."""
    return config.batch_size * config.n_heads * config.context_length**2 * element_bytes


def block_activation_bytes(config: ModelConfig, *, attention: str, element_bytes: int) -> dict[str, int]:
    """Bytes one block keeps for its backward pass, by component, each tensor once and no parameters.

    Counted for a block whose pointwise chains are fused (compiled, or hand-written kernels): the input of
    every matrix product and of every norm, the two halves of the SwiGLU, and what attention needs. In units
    of T = B S:

        norms        two inputs and two outputs, 4 T D, and a float32 scale for each token and norm
        projections  q, k and v after RoPE, T D + 2 T K H, and attention's output, T D
        attention    materialised: scores and probabilities, 2 B N S^2, and two float32 values a row;
                     flash: the log-sum-exp, 4 B N S bytes, and its output, T D, in the layout of q, which
                     the output projection reads from a copy with the heads side by side
        ffn          gate, up and their product, 3 T F

    Args:
        attention: "materialised" or "flash".
        element_bytes: of the activations.

    Raises:
        ValueError: an unknown kind of attention.
    """
    if attention not in ATTENTION_KINDS:
        raise ValueError(f"unknown attention {attention!r}; known: {', '.join(ATTENTION_KINDS)}")
    tokens = config.batch_size * config.context_length
    rows = tokens * config.n_heads
    d, kv = config.d_model, config.kv_heads * config.head_dim
    if attention == "flash":
        inside = 4 * rows + tokens * d * element_bytes
    else:
        inside = 2 * scores_bytes(config, element_bytes) + 2 * 4 * rows
    return {
        "norms": 4 * tokens * d * element_bytes + 2 * 4 * tokens,
        "projections": (2 * tokens * d + 2 * tokens * kv) * element_bytes,
        "attention": inside,
        "ffn": 3 * tokens * config.d_ff * element_bytes,
    }


def activation_bytes(
    config: ModelConfig, *, attention: str, element_bytes: int, checkpoint_every: int | None = None
) -> dict[str, int]:
    """Bytes of activations at the peak, where the backward pass begins, by component over the whole model.

    Args:
        checkpoint_every: None keeps everything. k keeps one [B, S, D] tensor a group of k blocks and rebuilds
            one group at a time: its residuals are the "recomputed" part of the peak.

    Returns:
        The components of `block_activation_bytes` over all kept blocks, "boundaries", "recomputed", and
        "head": final norm's input and output, and logits with their float32 probabilities.
    """
    block = block_activation_bytes(config, attention=attention, element_bytes=element_bytes)
    tokens = config.batch_size * config.context_length
    stream = residual_stream_bytes(config, element_bytes)
    head = 2 * stream + tokens * config.vocab_size * (element_bytes + 4) + 4 * tokens
    if checkpoint_every is None:
        kept = {name: config.n_layers * size for name, size in block.items()}
        return {**kept, "boundaries": 0, "recomputed": 0, "head": head}
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be at least 1, got {checkpoint_every}")
    group = min(checkpoint_every, config.n_layers)
    return {
        **dict.fromkeys(block, 0),
        "boundaries": math.ceil(config.n_layers / group) * stream,
        "recomputed": group * sum(block.values()),
        "head": head,
    }
