"""The AdamW update of one tensor in one pass over memory, with a low-precision copy as a by-product.

    adamw_(master, gradient, mean, square, step, copy=None, *, lr, betas, eps, weight_decay)

In place, all of one shape: master, mean and square float32; gradient float32 or 16 bit; copy (master in the
dtype of 16-bit products) or None; step 0-d float32, the number t of this step, from 1:

    p <- p - lr * weight_decay * p
    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g^2
    p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    copy <- p, rounded

(Loshchilov and Hutter 2019, algorithm 2.) With a 16-bit gradient and copy 28 bytes a parameter move, as many as the
update alone takes with float32 gradients: the casts of mixed precision cost nothing.
Read `reference` (the formula), `triton` (the kernel), then `function` (the launch).
"""
