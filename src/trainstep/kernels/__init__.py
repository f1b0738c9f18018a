"""Fused kernels other than attention, each a vertical slice: reference, Triton kernels, autograd function."""

from trainstep.kernels.registry import KERNELS, KernelRow, get_kernel, load_kernel

__all__ = ["KERNELS", "KernelRow", "get_kernel", "load_kernel"]
