"""Profiler ranges inside the reference: on when asked, absent otherwise, never in the way of compilation."""

import torch

from trainstep import ranges
from trainstep.attention.reference import attention

PARTS = {"attention scores", "attention mask", "attention softmax", "attention value product"}


def recorded() -> set[str]:
    q = torch.randn(1, 1, 8, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(q, q, q, causal=True)
    return {event.key for event in profile.key_averages()} & PARTS


def test_ranges_name_the_parts_of_attention_only_when_on():
    assert recorded() == set()
    ranges.enable()
    try:
        assert recorded() == PARTS
    finally:
        ranges.disable()
