"""The Triton kernel of the AdamW update: every element is read and written once."""

import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    master_ptr, gradient_ptr, mean_ptr, square_ptr, step_ptr, copy_ptr, count, turns,
    lr, log_beta1, log_beta2, kept, mean_weight, square_kept, square_weight, eps,
    HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs take turns over blocks of BLOCK elements of flat tensors. Grid: any number; turns are enough for all.

    kept = 1 - lr * weight_decay, mean_weight = 1 - beta1, square_kept = beta2, square_weight = 1 - beta2: the host
    computes them in float64, where 1 - 0.999 does not lose its digits. The same goes for 1 - beta^t here.
    """
    t = tl.load(step_ptr).to(tl.float64)
    step_size = (lr / (1.0 - tl.exp(t * log_beta1))).to(tl.float32)
    inverse_root = 1.0 / tl.sqrt((1.0 - tl.exp(t * log_beta2)).to(tl.float32))
    # In 64 bits: an output projection of a large vocabulary passes 2^31 elements.
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for turn in tl.range(0, turns):
        at = (turn * programs + program) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        inside = at < count
        gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(master_ptr + at, mask=inside, other=0.0)
        m = tl.load(mean_ptr + at, mask=inside, other=0.0)
        v = tl.load(square_ptr + at, mask=inside, other=0.0)
        m += mean_weight * (gradient - m)
        v = square_kept * v + square_weight * gradient * gradient
        denominator = tl.sqrt(v) * inverse_root + eps
        p = kept * p - step_size * m / denominator
        tl.store(mean_ptr + at, m, mask=inside)
        tl.store(square_ptr + at, v, mask=inside)
        tl.store(master_ptr + at, p, mask=inside)
        if HAS_COPY:
            tl.store(copy_ptr + at, p.to(copy_ptr.dtype.element_ty), mask=inside)
