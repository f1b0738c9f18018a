"""What a headline card says of two times."""

import pytest

from benchmarks.report.cards import card
from benchmarks.report.facts import facts_of
from tests.report.synthetic import is_peer, row

TAIL = "B1,N4,K4,S64,T64,H64,causal,fp32,w1"


def said(ours: float, peer: float, noise: float) -> str:
    """A card's HTML; samples of ours lie up to `noise` above `ours`."""
    rows = [
        row(f"attention/triton/forward/{TAIL}", ours, noise=noise),
        row(f"attention/flex/forward/{TAIL}", peer, noise=0),
    ]
    return str(card([facts_of(r) for r in rows], is_peer))


@pytest.mark.parametrize(
    ("ours", "peer", "noise", "side", "words"),
    [
        (1.0e-3, 1.5e-3, 0.0, "ahead", "triton is ahead of flex"),
        (1.5e-3, 1.0e-3, 0.0, "behind", "triton is behind flex"),
        (1.000e-3, 1.012e-3, 0.02, "level", "triton is within the spread of flex"),
        (1.000e-3, 1.007e-3, 0.02, "level", "triton is within the spread of flex"),
        (1.000e-3, 1.500e-3, 0.02, "ahead", "triton is ahead of flex"),
        (1.0e-3, 1.0e-3, 0.0, "level", "triton is within the spread of flex"),
    ],
)
def test_a_difference_below_the_spread_is_neither_ahead_nor_behind(ours, peer, noise, side, words):
    html = said(ours, peer, noise)
    assert f'class="ratio {side}"' in html and words in html
