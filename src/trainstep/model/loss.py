"""Cross-entropy of next-token logits."""

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean over the valid targets of -log softmax(logits)[target], computed in float32.

    With z = logits - max(logits): loss = log(sum(exp(z))) - z[target], which neither overflows nor loses the
    answer for large logits.

    Args:
        logits: [..., V], any floating dtype.
        targets: [...] integers in 0 .. V-1, or `ignore_index`.
        ignore_index: positions with this target count neither in the sum nor in the mean.

    Returns:
        A float32 scalar (float64 for float64 logits). Without any valid target it is NaN, a mean over
        nothing, as torch.nn.functional.cross_entropy has it; the gradient is zero then.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need targets of {tuple(logits.shape[:-1])}, "
            f"got {tuple(targets.shape)}"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = targets != ignore_index
    index = targets.where(valid, 0).long().unsqueeze(-1)
    # Shifted once for both terms: the difference of two large numbers would lose a small loss.
    shifted = wide - wide.detach().amax(dim=-1, keepdim=True)
    losses = shifted.exp().sum(dim=-1).log() - shifted.gather(-1, index).squeeze(-1)
    return losses.where(valid, 0.0).sum() / valid.sum()
