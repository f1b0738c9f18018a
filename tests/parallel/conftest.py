"""Persistent ranks for the whole session: a launch costs one to two seconds, a call some milliseconds."""

import os
import sys

import pytest
import torch

from trainstep.parallel.launch import Ranks

sys.path.insert(0, os.path.dirname(__file__))  # parallel_models, here and in the ranks
os.environ.setdefault("OMP_NUM_THREADS", "1")


class PatientRanks(Ranks):
    """Ranks with time for the imports of a first optimizer step on a busy machine."""

    def run(self, fn, *args, timeout_seconds=200.0, name=None):
        """As `Ranks.run`."""
        return super().run(fn, *args, timeout_seconds=timeout_seconds, name=name)


class Pools:
    """One pool a world size, started when first asked for and again after a test broke it."""

    def __init__(self, device):
        self.device = device
        self.pools = {}

    def __call__(self, world_size):
        """The pool of this size."""
        pool = self.pools.get(world_size)
        if pool is None or pool.closed:
            if self.device == "cuda" and world_size > torch.cuda.device_count():
                pytest.skip(f"needs {world_size} CUDA devices")
            pool = self.pools[world_size] = PatientRanks(world_size, self.device)
        return pool


@pytest.fixture(scope="session")
def device():
    """CUDA (NCCL) where two devices are at hand, else CPU (gloo)."""
    return "cuda" if torch.cuda.device_count() >= 2 else "cpu"


@pytest.fixture(scope="session")
def pools(device):
    """Pools of ranks by world size."""
    made = Pools(device)
    yield made
    for pool in made.pools.values():
        pool.close()


@pytest.fixture
def ranks(pools):
    """Two ranks."""
    return pools(2)
