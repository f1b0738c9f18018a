"""Attention behind one contract: reference, FlashAttention-2 (tiled PyTorch, Triton) and the peers."""
