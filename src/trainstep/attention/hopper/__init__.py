"""FlashAttention for Hopper (compute capability 9.0) in Triton's Gluon dialect."""
