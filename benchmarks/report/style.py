"""Colors and sizes of every chart, in matplotlib and on the page.

The palette is Okabe and Ito's ("Color Universal Design", 2008), told apart with every common kind of color
blindness, with lighter tones of the same hues on a dark ground. Color never stands alone: lines also differ
in their points' shapes, peers are dashed, and a status is spelled out.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Theme:
    """One ground and what is legible on it.

    Attributes:
        ground, surface, ink, muted, line, accent: page, cards and charts, text, secondary text, rules, links.
        good, bad, warn: always beside a word or a sign.
        series: the palette, in order of use.
    """

    ground: str
    surface: str
    raised: str
    ink: str
    muted: str
    line: str
    grid: str
    accent: str
    good: str
    bad: str
    warn: str
    series: tuple[str, ...]


def _hues(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LIGHT = Theme(
    ground="#f6f7f9",
    surface="#ffffff",
    raised="#f0f2f5",
    ink="#14181f",
    muted="#5a6472",
    line="#dde1e7",
    grid="#e9ecf0",
    accent="#0b62a8",
    good="#00734f",
    bad="#b3420a",
    warn="#8a6100",
    series=_hues(
        "#0072b2 #d55e00 #009e73 #c2609a #b57f00 #3fa3dd #6b7280 "
        "#7b4fbf #b3123f #6b7a00 #7a4a21 #008b94 #30343b"
    ),
)
DARK = Theme(
    ground="#0e1116",
    surface="#161b22",
    raised="#1f2630",
    ink="#e8ebf0",
    muted="#99a3b1",
    line="#2b323d",
    grid="#252c36",
    accent="#6cb8f5",
    good="#3ecf9a",
    bad="#ff8f57",
    warn="#f0bf4c",
    series=_hues(
        "#4aa8e8 #ff8642 #2fc795 #e596c3 #f0b83f #9bd8ff #a3adba "
        "#b394f0 #ff6b8b #b9c94a #c99668 #4fd3da #f5ead2"
    ),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
FONT = ("Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans")


def color_of(index: int, theme: Theme = LIGHT) -> str:
    """A series' color; -1 is the neutral of bounds. Beyond the palette hues repeat, with other shapes."""
    return theme.muted if index < 0 else theme.series[index % len(theme.series)]


def marker_of(index: int) -> str:
    """A series' point shape; the second round over the palette gets other shapes than the first."""
    return MARKERS[(index + index // len(LIGHT.series)) % len(MARKERS)]


def matplotlib_style() -> AbstractContextManager[Any]:
    """A context in which matplotlib draws in this house's style, without touching the caller's settings."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "font.family": "sans-serif",
            "font.sans-serif": list(FONT),
            "font.size": 10,
            "axes.titlesize": 12,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlepad": 12,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.left": False,
            "axes.edgecolor": LIGHT.muted,
            "axes.labelcolor": LIGHT.muted,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": LIGHT.grid,
            "xtick.color": LIGHT.muted,
            "ytick.color": LIGHT.muted,
            "ytick.left": False,
            "text.color": LIGHT.ink,
            "text.parse_math": False,  # a dollar sign from outside is a dollar sign
            "legend.frameon": False,
            "figure.facecolor": LIGHT.surface,
            "axes.facecolor": LIGHT.surface,
            "savefig.bbox": "tight",
            "savefig.dpi": 160,
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": "trainstep",  # the same chart gives the same file
        }
    )
