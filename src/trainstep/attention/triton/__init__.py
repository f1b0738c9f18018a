"""FlashAttention-2 as Triton kernels."""
