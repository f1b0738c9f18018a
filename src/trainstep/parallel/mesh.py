"""Ranks as a grid: sharding along one dimension, replicas along the other.

With R x S ranks, rank r*S + s holds shard s in replica r. Weights are gathered and gradients reduce-scattered
among the S ranks of a replica (put them in one node); the shards' gradients are then all-reduced among the R
ranks that hold the same shard.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def replicate_and_shard(replicas: int, shards: int, device: str) -> DeviceMesh:
    """A mesh with dimensions "replicate" [R] and "shard" [S], for `FSDP(..., mesh=...)`.

    Args:
        replicas: R.
        shards: S; R * S is the number of ranks.
        device: "cpu" or "cuda".

    Raises:
        ValueError: R * S is not the number of ranks.
    """
    ranks = dist.get_world_size()
    if replicas * shards != ranks:
        raise ValueError(
            f"{replicas} replicas of {shards} shards need {replicas * shards} ranks, not {ranks}"
        )
    return init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))
