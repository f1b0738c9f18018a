"""Floating-point operations of attention and of whole models, and model FLOPs utilisation.

A multiply and an add count as two. Only matrix products count: norms, softmax, RoPE, the embedding lookup and
the optimizer are left out, as everybody's MFU does (Chowdhery et al., PaLM, 2022, appendix B). Work that a
program does twice because it recomputes activations is not in any figure here, so recomputation never raises
MFU.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainstep.specs.model import ModelConfig

# Backward of one kernel: five products of the tile (S again, dV, dP, dQ, dK) against the forward's two.
KERNEL_BACKWARD = 2.5
# Backward of a model: two products (gradient to input, gradient to weight) for each one of the forward.
MODEL_BACKWARD = 2.0


def visible_pairs(*, queries: int, keys: int, causal: bool, window: int | None = None) -> int:
    """Query-key pairs that a mask leaves visible, exactly.

    Bottom-right alignment: query i sees key j when i + (S' - S) - window < j <= i + (S' - S).

    Raises:
        ValueError: a length below 1, a window below 1 or a window without causal.
    """
    if queries < 1 or keys < 1:
        raise ValueError(f"queries and keys must be at least 1, got {queries} and {keys}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if not causal:
        if window is not None:
            raise ValueError("a window needs causal attention")
        return queries * keys
    width = keys if window is None else window

    def first(rows: int) -> int:
        """Pairs of the first `rows` rows of a square causal mask: sum of min(row + 1, width)."""
        ramp = min(rows, width)
        return ramp * (ramp + 1) // 2 + (rows - ramp) * width

    return first(keys) - first(max(keys - queries, 0))


def attention_flops(
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    causal: bool,
    window: int | None = None,
    phase: str,
) -> float:
    """FLOPs by which an attention kernel's rate is counted.

    4 B N S S' H forward and 2.5 times that backward. Causal attention counts exactly half at S = S' (the
    convention of published rates) and the visible pairs otherwise; a window that hides anything counts its
    visible pairs.

    Args:
        phase: "forward", "backward" or "forward_backward".

    Raises:
        ValueError: an unknown phase, or a mask that `visible_pairs` refuses.
    """
    factors = {"forward": 1.0, "backward": KERNEL_BACKWARD, "forward_backward": 1.0 + KERNEL_BACKWARD}
    if phase not in factors:
        raise ValueError(f"unknown phase {phase!r}; known: {', '.join(factors)}")
    pairs = _counted_pairs(queries, keys, causal, window)
    return factors[phase] * 4.0 * batch * heads * head_dim * pairs


def _counted_pairs(queries: int, keys: int, causal: bool, window: int | None) -> float:
    pairs = visible_pairs(queries=queries, keys=keys, causal=causal, window=window)
    if causal and queries == keys and (window is None or window >= keys):
        return queries * keys / 2
    return pairs


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of one step over the whole batch: by component, and their sum."""

    by_component: dict[str, float]

    @property
    def total(self) -> float:
        """Sum over the components."""
        return math.fsum(self.by_component.values())


def layer_window(config: "ModelConfig", layer: int) -> int | None:
    """Window of a layer by index; None where it attends globally (the last of each `global_every` layers)."""
    if config.window is None:
        return None
    if config.global_every is not None and (layer + 1) % config.global_every == 0:
        return None
    return config.window


def model_flops(config: "ModelConfig", *, phase: str, causal_half: bool) -> ModelFlops:
    """FLOPs of a model over one batch of `batch_size` sequences of `context_length`.

    Args:
        phase: "forward", "backward" (twice the forward), "forward_backward" or "train_step" (the same: the
            optimizer's arithmetic is not counted).
        causal_half: count the scores that causal and window masks leave visible (as `attention_flops` does,
            exactly half without a window). False counts all S^2 of every layer, as the 12 L D S rule and
            `FlopCounterMode` on materialised scores do.

    Returns:
        Components "embedding" (0: a lookup), "projections" (q, k, v, output), "scores" (Q K^T and P V), "ffn"
        and "lm_head" (counted also when its weight is tied).
    """
    factors = {"forward": 1.0, "backward": MODEL_BACKWARD}
    factors["forward_backward"] = factors["train_step"] = 1.0 + MODEL_BACKWARD
    if phase not in factors:
        raise ValueError(f"unknown phase {phase!r}; known: {', '.join(factors)}")
    b, s, d, h, layers = (
        config.batch_size,
        config.context_length,
        config.d_model,
        config.head_dim,
        config.n_layers,
    )
    tokens = b * s
    if causal_half:
        pairs = math.fsum(_counted_pairs(s, s, True, layer_window(config, i)) for i in range(layers))
    else:
        pairs = float(layers * s * s)
    forward = {
        "embedding": 0.0,
        "projections": 2.0 * tokens * layers * (2 * d * d + 2 * d * config.kv_heads * h),
        "scores": 4.0 * b * config.n_heads * h * pairs,
        "ffn": 2.0 * tokens * layers * 3 * d * config.d_ff,
        "lm_head": 2.0 * tokens * d * config.vocab_size,
    }
    return ModelFlops(by_component={name: factors[phase] * value for name, value in forward.items()})


def mfu(flops: float, seconds: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation as a fraction: flops / seconds / peak.

    Args:
        flops: of the work done by all devices together, from `model_flops`.
        seconds: of the step.
        peak: FLOP/s of all those devices together; None when the device is unknown.

    Returns:
        None without a peak. A value above 1 is returned as it is: ask `mfu_flag` for what to print beside it.

    Raises:
        ValueError: seconds or peak is not positive.
    """
    if peak is None:
        return None
    if not seconds > 0 or not peak > 0:
        raise ValueError(f"MFU needs positive seconds and peak, got {seconds!r} and {peak!r}")
    return flops / seconds / peak


def mfu_flag(value: float | None) -> str | None:
    """What is wrong with an MFU: a reason when it lies above 1, else None."""
    if value is not None and value > 1:
        return f"MFU of {value:.0%} is above the device's peak: the time, the FLOPs or the peak is wrong"
    return None
