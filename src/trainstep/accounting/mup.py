"""The maximal-update parametrisation: how initialisation and learning rate go with width, by kind of layer.

For Adam and its kin, whose updates have a size of their own (Yang et al. 2022, Tensor Programs V, table 3): a
learning rate tuned at one width then serves every width, and no layer's activations change more, or less, as
the model grows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Powers of the width (of the layer's inputs, relative to a base width).

    Attributes:
        variance: of the initial weights.
        learning_rate: of Adam's learning rate.
        says: why, in a line.
    """

    variance: int
    learning_rate: int
    says: str


# "embedding": finite inputs, width outputs. "hidden": both grow. "output": width inputs, finite outputs.
# "gain": a vector over the width.
MUP: Mapping[str, Scaling] = MappingProxyType(
    {
        "embedding": Scaling(
            variance=0, learning_rate=0, says="one row is read at a time, whatever the width"
        ),
        "hidden": Scaling(
            variance=-1, learning_rate=-1, says="updates of all inputs point the same way and add up"
        ),
        "output": Scaling(
            variance=-2, learning_rate=-1, says="logits start vanishing, so that updates lead them"
        ),
        "gain": Scaling(variance=0, learning_rate=0, says="acts on each coordinate alone"),
    }
)
STANDARD: Mapping[str, Scaling] = MappingProxyType(
    {
        "embedding": Scaling(variance=0, learning_rate=0, says="one learning rate for all"),
        "hidden": Scaling(variance=-1, learning_rate=0, says="keeps the size of activations at the start"),
        "output": Scaling(variance=-1, learning_rate=0, says="keeps the size of logits at the start"),
        "gain": Scaling(variance=0, learning_rate=0, says="one learning rate for all"),
    }
)
TABLES: Mapping[str, Mapping[str, Scaling]] = MappingProxyType({"mup": MUP, "standard": STANDARD})


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a kind of layer gets at a width.

    Attributes:
        std_factor: times the standard deviation of the initial weights at the base width.
        learning_rate_factor: times the learning rate at the base width.
    """

    kind: str
    std_factor: float
    learning_rate_factor: float


def setting(parametrisation: str, kind: str, *, width: int, base_width: int) -> Setting:
    """Initialisation and learning rate of a kind of layer, relative to the base width.

    Attention's scores need 1/H instead of 1/sqrt(H) only where the head width H grows; with more heads of one
    width they need nothing.

    Raises:
        ValueError: an unknown parametrisation or kind, or a width below 1.
    """
    if parametrisation not in TABLES:
        raise ValueError(f"unknown parametrisation {parametrisation!r}; known: {', '.join(TABLES)}")
    if kind not in MUP:
        raise ValueError(f"unknown kind of layer {kind!r}; known: {', '.join(MUP)}")
    if width < 1 or base_width < 1:
        raise ValueError(f"widths must be at least 1, got {width} and {base_width}")
    row, ratio = TABLES[parametrisation][kind], width / base_width
    return Setting(
        kind=kind,
        std_factor=ratio ** (row.variance / 2),
        learning_rate_factor=ratio**row.learning_rate,
    )


def table(parametrisation: str, *, widths: tuple[int, ...], base_width: int) -> list[dict[str, object]]:
    """Rows for a report: a kind of layer at a width, with both factors."""
    return [
        {
            "layer": kind,
            "width": width,
            "initial std": made.std_factor,
            "learning rate": made.learning_rate_factor,
            "because": TABLES[parametrisation][kind].says,
        }
        for kind in MUP
        for width in widths
        for made in (setting(parametrisation, kind, width=width, base_width=base_width),)
    ]
