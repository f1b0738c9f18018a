"""A settled process reuses the memory that it freed."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from benchmarks.measure.settle import settle
if sys.argv[1] == "settled":
    settle()
def work():
    return torch.ones(4, 1024, 1024).exp().sum()
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)
"""


def faults(how):
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_memory_is_not_given_back():
    # Two tensors of 16 MiB are 8192 pages.
    assert faults("as it is") > 4000
    assert faults("settled") < 400
