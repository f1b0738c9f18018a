"""A settled process reuses the memory that it freed."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from benchmarks.measure.settle import settle
if sys.argv[1] == "settled":
    settle()
def work():
    first = torch.ones(7, 1024, 1024)
    second = first.exp()
    return second.exp().sum()
for _ in range(10):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)
"""


def faults(how):
    # malloc adapts its threshold as the process goes; held still, it always gives large tensors back.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], env=env, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_memory_is_not_given_back():
    # Three tensors of 28 MiB, 7168 pages each.
    assert faults("as it is") > 20000
    assert faults("settled") < 700
