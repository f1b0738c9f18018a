"""The model size and tokens that give the lowest loss for a budget of FLOPs."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LossSurface:
    """L(P, T) = floor + a P^-alpha + b T^-beta in parameters P and training tokens T.

    Attributes:
        source: where the constants are from.
    """

    floor: float
    a: float
    alpha: float
    b: float
    beta: float
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        """Loss in nats a token."""
        return self.floor + self.a * parameters**-self.alpha + self.b * tokens**-self.beta


SURFACES = {
    "hoffmann-2022": LossSurface(
        floor=1.69,
        a=406.4,
        alpha=0.34,
        b=410.7,
        beta=0.28,
        source="Hoffmann et al., Training Compute-Optimal Large Language Models, 2022, approach 3",
    ),
    "besiroglu-2024": LossSurface(
        floor=1.8172,
        a=482.01,
        alpha=0.3478,
        b=2085.43,
        beta=0.3658,
        source="Besiroglu et al., Chinchilla Scaling: A Replication Attempt, 2024",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best use of a budget.

    Attributes:
        parameters: P, without embeddings.
        tokens: T.
        loss: that the surface predicts.
    """

    parameters: float
    tokens: float
    loss: float


def compute_optimal(flops: float, surface: LossSurface, *, flops_per_parameter_token: float = 6.0) -> Optimum:
    """Minimise L(P, T) over 6 P T = C, in closed form.

    P = G (C/6)^(beta/(alpha+beta)), T = (C/6)/P, G = (alpha a / (beta b))^(1/(alpha+beta)) (Hoffmann et al.
    2022, eq. 4).

    Args:
        flops: C, forward and backward.
        flops_per_parameter_token: 6 without attention scores.

    Raises:
        ValueError: the budget is not positive.
    """
    if not flops > 0:
        raise ValueError(f"a budget must be positive, got {flops!r} FLOPs")
    product = flops / flops_per_parameter_token
    both = surface.alpha + surface.beta
    balance = (surface.alpha * surface.a / (surface.beta * surface.b)) ** (1 / both)
    parameters = balance * product ** (surface.beta / both)
    tokens = product / parameters
    return Optimum(parameters=parameters, tokens=tokens, loss=surface.loss(parameters, tokens))


def isoflop_minimum(parameters: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """Size and loss at the bottom of the parabola through (log P, L) of runs with one budget.

    The second approach of Hoffmann et al. 2022; a power law through the bottoms of several budgets
    (`scaling_law.fit_power_law`) gives the optimal size for any.

    Raises:
        ValueError: fewer than three sizes, or a parabola without a minimum.
    """
    import numpy as np

    sizes = np.log(np.asarray(parameters, dtype=float))
    if len(np.unique(sizes)) < 3 or len(sizes) != len(losses):
        raise ValueError(
            f"a parabola needs at least three sizes with a loss each, got {len(set(parameters))}"
        )
    centre = sizes.mean()
    curvature, slope, level = np.polyfit(sizes - centre, np.asarray(losses, dtype=float), 2)
    if not curvature > 0:
        raise ValueError("the losses have no minimum between the smallest and the largest size")
    bottom = -slope / (2 * curvature)
    return float(np.exp(centre + bottom)), float(level - slope**2 / (4 * curvature))
