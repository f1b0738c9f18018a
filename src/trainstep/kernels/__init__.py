"""Fused kernels other than attention, each a vertical slice: reference, Triton kernels, autograd function."""
