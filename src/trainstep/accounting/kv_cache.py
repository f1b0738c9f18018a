"""Bytes of inference: weights, key/value cache, peak activations, and where the first two cross."""

from math import isqrt

from trainstep.accounting import params
from trainstep.accounting.flops import layer_window
from trainstep.specs.model import ModelConfig


def kv_cache_bytes(config: ModelConfig, *, batch: int, context: int, element_bytes: int) -> int:
    """Bytes of cached keys and values: 2 B S K H L bytes; a window w caps the positions of its layer."""
    if batch < 1 or context < 0:
        raise ValueError(f"batch must be at least 1 and context at least 0, got {batch} and {context}")
    positions = 0
    for layer in range(config.n_layers):
        window = layer_window(config, layer)
        positions += context if window is None else min(context, window)
    return 2 * batch * positions * config.kv_heads * config.head_dim * element_bytes


def inference_bytes(
    config: ModelConfig, *, phase: str, batch: int, context: int, element_bytes: int, attention: str = "flash"
) -> dict[str, int]:
    """Peak bytes of inference by part: "weights", "kv_cache", "activations".

    Nothing is kept for a backward pass, so the peak is the largest set of tensors alive at once in one layer:
    the residual stream with q, k, v and, materialised, scores and probabilities; or with gate and up; or, at
    the end, with the logits of each sequence's last token (float32).

    Args:
        phase: "prefill" (all `context` tokens in one pass) or "decode" (one token a sequence against them).
        attention: "flash" or "materialised".

    Raises:
        ValueError: an unknown phase or attention.
    """
    if phase not in ("prefill", "decode"):
        raise ValueError(f"unknown phase {phase!r}; known: prefill, decode")
    if attention not in ("flash", "materialised"):
        raise ValueError(f"unknown attention {attention!r}; known: flash, materialised")
    queries = context if phase == "prefill" else 1
    tokens, d, kv = batch * queries, config.d_model, config.kv_heads * config.head_dim
    scores = batch * config.n_heads * queries * context if attention == "materialised" else 0
    in_attention = (tokens * (3 * d + 2 * kv) + 2 * scores) * element_bytes  # stream, q, k, v, output
    in_ffn = tokens * (2 * d + 2 * config.d_ff) * element_bytes  # stream, its norm, gate, up
    in_head = 2 * tokens * d * element_bytes + 4 * batch * config.vocab_size
    return {
        "weights": params.count(config) * element_bytes,
        "kv_cache": kv_cache_bytes(config, batch=batch, context=context, element_bytes=element_bytes),
        "activations": max(in_attention, in_ffn, in_head),
    }


def cache_overtakes_weights(config: ModelConfig, *, batch: int) -> int | None:
    """Shortest context at which the cache is larger than the weights (both in the same dtype).

    None when windows keep it smaller at every length.
    """
    weights = params.count(config)
    widths = sorted(w for w in (layer_window(config, i) for i in range(config.n_layers)) if w is not None)
    position = 2 * batch * config.kv_heads * config.head_dim
    growing, held = config.n_layers, 0  # layers still growing, positions held by full windows
    for width in [*widths, None]:
        if growing:
            context = (weights // position - held) // growing + 1
            if width is None or context <= width:
                return context
        if width is not None:
            growing, held = growing - 1, held + width
    return None


def scores_overtake_weights(config: ModelConfig, *, batch: int) -> int:
    """Shortest context at which the [B, N, S, S] scores of a layer outgrow all weights, in the same dtype."""
    return isqrt(params.count(config) // (batch * config.n_heads)) + 1
