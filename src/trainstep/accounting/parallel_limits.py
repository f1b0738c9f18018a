"""Up to how many devices one SwiGLU layer stays bound by computation, cut by data, weights or tensors.

One feed-forward layer of three D x F matrices, a batch of B tokens over all devices, 2-byte values, C FLOP/s
a device and W bytes/s in each direction of a ring (as in DeepMind's "How to Scale Your Model", 2025, for two
matrices). Seconds on N devices, forward (backward computes twice as much):

    computing                       6 B D F / (N C)
    FSDP, weights gathered          6 D F (N-1)/N / W            (backward: gathered again and
    reduce-scattered, twice) DP, gradients all-reduced       backward only, 12 D F (N-1)/N / W
    TP, output all-reduced          4 B D (N-1)/N / W            (backward: the input's gradient, the same)

A limit is the N up to which communication takes no longer than computing. The symbolic half derives the
limits from these seconds with sympy; the numeric half evaluates them.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer and its device.

    Attributes:
        tokens: B, over all devices.
        d_ff: F.
        flops_per_second: C.
        bytes_per_second: W.

    Raises:
        ValueError: a value that is not positive.
    """

    tokens: float
    d_ff: float
    flops_per_second: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")

    @property
    def data_ratio(self) -> float:
        """a = B W / C: tokens against the intensity of the network."""
        return self.tokens * self.bytes_per_second / self.flops_per_second

    @property
    def tensor_ratio(self) -> float:
        """3 F W / (2 C)."""
        return 1.5 * self.d_ff * self.bytes_per_second / self.flops_per_second

    @property
    def trade(self) -> float:
        """b = 2 B / (3 F): what a unit of the tensor axis costs in units of the data axis."""
        return 2 * self.tokens / (3 * self.d_ff)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The largest FSDP x TP mesh: real-valued axes, each at least 1."""

    data: float
    tensor: float

    @property
    def devices(self) -> float:
        """N, the product of both axes."""
        return self.data * self.tensor


def data_limit(layer: Layer) -> float:
    """Devices for plain or fully sharded data parallelism, forward and backward alike: 1 + B W / C."""
    return 1 + layer.data_ratio


def tensor_limit(layer: Layer, phase: str) -> float:
    """Devices for tensor parallelism: 1 + 3 F W / (2 C) forward, 1 + 3 F W / C backward.

    Raises:
        ValueError: the phase is neither.
    """
    if phase not in ("forward", "backward"):
        raise ValueError(f"unknown phase {phase!r}; known: forward, backward")
    return 1 + layer.tensor_ratio * (1 if phase == "forward" else 2)


def mesh_limit(layer: Layer, *, overlapped: bool) -> Mesh:
    """The largest FSDP x TP mesh whose forward pass is bound by computing.

    With X devices along data and Y along tensors, gathering takes 6 D F (X-1) / (N W) and reducing
    4 B D (Y-1) / (N W).

    Args:
        overlapped: the two axes communicate at the same time, over links of their own: X <= 1 + B W / C and
            Y <= 1 + 3 F W / (2 C). Otherwise they follow one another, (X-1) + b (Y-1) <= a, whose largest X Y
            is (1+a+b)^2 / (4 b) at X = (1+a+b)/2, Y = X/b. Where that would put an axis under 1, it stays at
            1 and the other one goes to its end: X = 1 + a, or Y = 1 + a/b.
    """
    a, b = layer.data_ratio, layer.trade
    if overlapped:
        return Mesh(data=data_limit(layer), tensor=tensor_limit(layer, "forward"))
    if 1 + a + b < 2:  # X would fall under 1
        return Mesh(data=1.0, tensor=1 + a / b)
    if 1 + a + b < 2 * b:  # Y would
        return Mesh(data=1 + a, tensor=1.0)
    return Mesh(data=(1 + a + b) / 2, tensor=(1 + a + b) / (2 * b))


def symbolic() -> dict[str, Any]:
    """The limits as sympy expressions in B, F, W, C (positive symbols), derived from the seconds above.

    Returns:
        "DP", "FSDP forward", "FSDP backward", "TP forward", "TP backward", "FSDP x TP overlapped" and
        "FSDP x TP not overlapped" (in the interior, where both axes are above 1).
    """
    import sympy

    b, d, f, w, c, n, x, y = sympy.symbols("B D F W C N X Y", positive=True)
    computing = 6 * b * d * f / (n * c)
    gather = 6 * d * f * (n - 1) / (n * w)
    reduce = 4 * b * d * (n - 1) / (n * w)

    def limit(communicating: Any, computed: Any) -> Any:
        (solution,) = sympy.solve(sympy.Eq(communicating, computed), n)
        return sympy.expand(solution)

    fsdp = limit(gather, computing)
    tensor = limit(reduce, computing)
    on_mesh = computing.subs(n, x * y)
    gather_mesh = 6 * d * f * (x - 1) / (x * y * w)
    reduce_mesh = 4 * b * d * (y - 1) / (x * y * w)
    # On the boundary X follows from Y; the product X Y is a parabola in Y with one maximum.
    (edge,) = sympy.solve(sympy.Eq(gather_mesh + reduce_mesh, on_mesh), x)
    (best,) = sympy.solve(sympy.diff(edge * y, y), y)
    return {
        "DP": limit(2 * gather, 2 * computing),
        "FSDP forward": fsdp,
        "FSDP backward": limit(2 * gather, 2 * computing),
        "TP forward": tensor,
        "TP backward": limit(reduce, 2 * computing),
        "FSDP x TP overlapped": sympy.factor(fsdp * tensor),
        "FSDP x TP not overlapped": sympy.factor((edge * y).subs(y, best)),
    }
