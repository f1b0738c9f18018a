"""Scaling laws: fits with confidence intervals, and the compute-optimal model.

    loss            L(C)  = L_inf + b C^-a        non-linear least squares
    learning rate   lr(C) = b C^-a                log-linear closed form, or non-linear least squares

C is anything that grows (FLOPs, parameters, tokens). Intervals are those of least squares: estimate plus or
minus Student's t times the standard error from the residuals and the Jacobian; b, which is positive, has its
interval in log b. Fits are made around the middle of the data (the geometric mean of C), where b and a hardly
depend on one another; only then is b carried back to C = 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, log

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A fitted value with the ends of its confidence interval."""

    value: float
    low: float
    high: float

    def __contains__(self, truth: float) -> bool:
        return self.low <= truth <= self.high


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted law.

    Attributes:
        floor: L_inf; None for a law without one.
        scale: b, at C = 1.
        exponent: a.
        confidence: of the intervals, 0.95 for 95%.
        residual: standard deviation of what is left: of log y for the log-linear form, else of y.
        points: data it was fitted to.
    """

    floor: Estimate | None
    scale: Estimate
    exponent: Estimate
    confidence: float
    residual: float
    points: int
    _centre: float
    _parameters: tuple[float, ...]
    _covariance: tuple[tuple[float, ...], ...]
    _logarithmic: bool
    _quantile: float

    def predict(self, x: float) -> Estimate:
        """The law at x with the confidence interval of its mean (not of a new measurement)."""
        distance = log(x) - self._centre
        if self._logarithmic:
            gradient = np.array([1.0, -distance])
            middle = self._parameters[0] - self._parameters[1] * distance
        else:
            power = exp(self._parameters[0] - self._parameters[1] * distance)
            gradient = np.array([power, -distance * power])
            middle = power
        if self.floor is not None:
            gradient, middle = np.append(gradient, 1.0), middle + self._parameters[2]
        half = self._quantile * float(np.sqrt(gradient @ np.array(self._covariance) @ gradient))
        ends = middle, middle - half, middle + half
        if self._logarithmic:
            ends = exp(ends[0]), exp(ends[1]), exp(ends[2])
        return Estimate(value=ends[0], low=ends[1], high=ends[2])


def _checked(x: ArrayLike, y: ArrayLike, unknowns: int, confidence: float) -> tuple[Vector, Vector]:
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if xs.ndim != 1 or xs.shape != ys.shape:
        raise ValueError(f"a fit needs two rows of equal length, got shapes {xs.shape} and {ys.shape}")
    if not (np.isfinite(xs).all() and np.isfinite(ys).all() and (xs > 0).all() and (ys > 0).all()):
        raise ValueError("a power law needs positive, finite values")
    if len(np.unique(xs)) <= unknowns:
        raise ValueError(
            f"{unknowns} unknowns need at least {unknowns + 1} different x, got {len(np.unique(xs))}"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence!r}")
    return xs, ys


def fit_power_law(x: ArrayLike, y: ArrayLike, *, method: str = "log-linear", confidence: float = 0.95) -> Fit:
    """Fit y = b x^-a.

    Args:
        method: "log-linear" takes the straight line through (log x, log y), in closed form: right when errors
            are a share of y. "least-squares" minimises errors in y itself: right when they are equally large
            for all y.
        confidence: of the intervals.

    Raises:
        ValueError: an unknown method, data that are not positive, or too few different x.
    """
    if method not in ("log-linear", "least-squares"):
        raise ValueError(f"unknown method {method!r}; known: log-linear, least-squares")
    xs, ys = _checked(x, y, 2, confidence)
    centre = float(np.log(xs).mean())
    distance, logs = np.log(xs) - centre, np.log(ys)
    slope = float((distance @ logs) / (distance @ distance))
    start = np.array([logs.mean(), -slope])
    if method == "log-linear":
        design = np.stack([np.ones_like(distance), -distance], axis=1)
        return _finish(start, logs - design @ start, design, centre, confidence, logarithmic=True)

    def curve(p: Vector) -> Vector:
        return np.exp(p[0] - p[1] * distance)

    def jacobian(p: Vector) -> Vector:
        power = curve(p)
        return np.stack([power, -distance * power], axis=1)

    found = _least_squares(curve, jacobian, ys, [start])
    return _finish(found, ys - curve(found), jacobian(found), centre, confidence)


def fit_saturating(x: ArrayLike, y: ArrayLike, *, confidence: float = 0.95) -> Fit:
    """Fit y = floor + b x^-a by non-linear least squares.

    For a given exponent floor and b follow linearly; the best of a row of exponents is where the search
    starts.

    Raises:
        ValueError: data that are not positive, too few different x, or y that do not fall with x.
    """
    xs, ys = _checked(x, y, 3, confidence)
    centre = float(np.log(xs).mean())
    distance = np.log(xs) - centre
    starts: list[tuple[float, Vector]] = []
    for exponent in np.geomspace(0.01, 3.0, 60):
        design = np.stack([np.exp(-exponent * distance), np.ones_like(distance)], axis=1)
        (power, floor), *_ = np.linalg.lstsq(design, ys, rcond=None)
        if power > 0:
            error = float(np.sum((design @ [power, floor] - ys) ** 2))
            starts.append((error, np.array([log(power), exponent, floor])))
    if not starts:
        raise ValueError("the values do not fall as x grows, so no saturating power law fits")

    def curve(p: Vector) -> Vector:
        return p[2] + np.exp(p[0] - p[1] * distance)

    def jacobian(p: Vector) -> Vector:
        power = np.exp(p[0] - p[1] * distance)
        return np.stack([power, -distance * power, np.ones_like(distance)], axis=1)

    starts.sort(key=lambda start: start[0])
    found = _least_squares(curve, jacobian, ys, [start for _, start in starts[:1]])
    return _finish(found, ys - curve(found), jacobian(found), centre, confidence)


def _least_squares(
    curve: Callable[[Vector], Vector],
    jacobian: Callable[[Vector], Vector],
    ys: Vector,
    starts: Sequence[Vector],
) -> Vector:
    from scipy.optimize import least_squares

    scale = float(np.abs(ys).max())
    results = [
        least_squares(
            lambda p: (curve(p) - ys) / scale,
            start,
            jac=lambda p: jacobian(p) / scale,
            method="lm",
            xtol=1e-14,
            ftol=1e-14,
            gtol=1e-14,
        )
        for start in starts
    ]
    best = min(results, key=lambda result: result.cost)
    return np.asarray(best.x)


def _finish(
    found: Vector,
    left: Vector,
    jacobian: Vector,
    centre: float,
    confidence: float,
    *,
    logarithmic: bool = False,
) -> Fit:
    from scipy.stats import t

    freedom = len(left) - len(found)
    variance = float(left @ left) / freedom
    covariance = variance * np.linalg.pinv(jacobian.T @ jacobian)
    quantile = float(t.ppf((1 + confidence) / 2, freedom))

    def around(value: float, error: float) -> tuple[float, float, float]:
        return value, value - quantile * error, value + quantile * error

    errors = np.sqrt(np.diag(covariance))
    # log b at x = 1 is the value at the centre plus a times the way there.
    carry = np.zeros(len(found))
    carry[:2] = 1.0, centre
    log_scale = around(float(carry @ found), float(np.sqrt(carry @ covariance @ carry)))
    scale = Estimate(value=_exp(log_scale[0]), low=_exp(log_scale[1]), high=_exp(log_scale[2]))
    value, low, high = around(float(found[1]), float(errors[1]))
    floor = None
    if len(found) == 3:
        middle, below, above = around(float(found[2]), float(errors[2]))
        floor = Estimate(value=middle, low=below, high=above)
    return Fit(
        floor=floor,
        scale=scale,
        exponent=Estimate(value=value, low=low, high=high),
        confidence=confidence,
        residual=variance**0.5,
        points=len(left),
        _centre=centre,
        _parameters=tuple(float(p) for p in found),
        _covariance=tuple(tuple(float(c) for c in row) for row in covariance),
        _logarithmic=logarithmic,
        _quantile=quantile,
    )


def _exp(value: float) -> float:
    """exp without overflow: an interval may end in infinity."""
    return exp(value) if value < 700 else inf
