"""Fully sharded data parallelism: weights cut over ranks, whole only while they are used.

`shard.py` cuts one weight and moves it, `wrapper.py` says when, `order.py` that all ranks agree,
`state.py` saves and loads.
"""

from trainstep.parallel.fsdp.wrapper import FSDP

__all__ = ["FSDP"]
