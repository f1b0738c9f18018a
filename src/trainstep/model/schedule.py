"""Learning-rate schedule."""

import math


def cosine_with_warmup(
    step: int, *, max_lr: float, min_lr: float, warmup_steps: int, cosine_steps: int
) -> float:
    """Learning rate at a step counted from 0: linear to `max_lr`, half a cosine to `min_lr`, then `min_lr`.

        step < warmup_steps:    max_lr * step / warmup_steps
        step < cosine_steps:    min_lr + (1 + cos(pi * p)) / 2 * (max_lr - min_lr),
                                p = (step - warmup_steps) / (cosine_steps - warmup_steps)
        later:                  min_lr

    (Loshchilov and Hutter 2017, eq. 5, without restarts.)

    Args:
        step: at least 0; step 0 of a warm-up has rate 0.
        max_lr: peak, reached at `warmup_steps`.
        min_lr: floor, reached at `cosine_steps`.
        warmup_steps: length of the linear part; 0 starts at the peak.
        cosine_steps: the step at which the cosine ends, counted from 0, warm-up included.

    Raises:
        ValueError: a negative step, or a cosine that ends before the warm-up does.
    """
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")
    if not 0 <= warmup_steps <= cosine_steps:
        raise ValueError(f"need 0 <= warmup_steps <= cosine_steps, got {warmup_steps} and {cosine_steps}")
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    if step < cosine_steps:
        progress = (step - warmup_steps) / (cosine_steps - warmup_steps)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (max_lr - min_lr)
    return min_lr
