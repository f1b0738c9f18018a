"""What devices reach in fact: a literal table of measurements, and the rates fitted from some of them, once.

The rates are argued, one measurement each, and never adjusted to a step time that they should predict:

    products       sustained bfloat16 rate of large products; the float32 rate from one forward pass
    attention      seconds a query-key pair, a + b H: exponentials do not grow with the head width, products
    do fused kernels  the rate of a plain copy
    eager kernels  the rate of an optimizer that is nothing but elementwise kernels
    host           seconds a launched kernel from a model too small to keep the device busy, by phase;
    entering
                   compiled blocks from a smaller one, compiled
    collectives    bus bandwidth and the time of a call from two all-reduces

Rows used for the fit are marked; the others are predicted (see `validation`). They were measured before this package had
records of its own (`results/records`), with a plain model whose softmax and AdamW are written out, operation by
operation, which `execution` counts; this package's own `plain` is faster.
"""

from dataclasses import dataclass, field
from functools import cache

from trainstep.accounting.execution import (
    EXECUTIONS,
    Work,
    attention_kernel_flops,
    block_work,
    head_work,
    optimizer_work,
    tensors,
)
from trainstep.specs.device import DeviceSpec, get_device
from trainstep.specs.model import ModelConfig, get_model

SOURCE = "one or two H200 SXM (NVLink), PyTorch 2.11, Triton 3.6, 2026"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured figure.

    Attributes:
        low, high: the value, or the range over runs, in `unit`.
        fits: what is fitted from it; None for a figure that is predicted, or only for reading.
    """

    name: str
    low: float
    high: float
    unit: str
    fits: str | None = None
    source: str = SOURCE

    @property
    def middle(self) -> float:
        """Middle of the range."""
        return (self.low + self.high) / 2


def _ms(name: str, low: float, high: float | None = None, fits: str | None = None) -> Measurement:
    high = low if high is None else high
    return Measurement(name=name, low=low / 1e3, high=high / 1e3, unit="s", fits=fits)


# Names of steps: preset, dtype, execution, devices, phase.
MEASUREMENTS = {
    row.name: row
    for row in (
        Measurement(
            name="bf16 product, sustained", low=700e12, high=700e12, unit="FLOP/s", fits="bf16 products"
        ),
        Measurement(name="bf16 product, 8192 cubed", low=788e12, high=788e12, unit="FLOP/s"),
        Measurement(name="copy", low=4.3e12, high=4.3e12, unit="B/s", fits="fused kernels"),
        _ms("attention H128 S16384 N16 forward", 1.92, fits="attention"),
        _ms("attention H128 S16384 N16 forward_backward", 7.16, 7.45, fits="attention"),
        _ms("attention H64 S16384 N16 forward_backward", 4.46, 4.57, fits="attention"),
        _ms("all-reduce 1MB x2", 0.059, fits="collective call"),
        _ms("all-reduce 10MB x2", 0.096),
        _ms("all-reduce 100MB x2", 0.396),
        _ms("all-reduce 1GB x2", 3.11, fits="bus bandwidth"),
        _ms("medium fp32 plain-compiled forward", 44, fits="fp32 products"),
        _ms("xl fp32 plain optimizer", 122, fits="eager kernels"),
        _ms("large amp-bf16 plain forward", 92, fits="host, forward"),
        _ms("large amp-bf16 plain backward", 110, fits="host, backward"),
        _ms("large amp-bf16 plain optimizer", 62, fits="host, optimizer"),
        _ms("small amp-bf16 plain-compiled forward_backward", 26, fits="host, compiled"),
        _ms("small amp-bf16 plain step", 93),
        _ms("small amp-bf16 plain-compiled step", 51),
        _ms("medium fp32 plain step", 200),
        _ms("medium fp32 plain-compiled step", 164),
        _ms("medium amp-bf16 plain step", 166),
        _ms("medium amp-bf16 plain-compiled step", 80),
        _ms("large fp32 plain step", 424),
        _ms("xl fp32 plain step", 1173),
        _ms("xl fp32 plain-compiled step", 1087),
        _ms("xl amp-bf16 plain step", 342, 377),
        _ms("xl fp32 plain x2 overlapped", 608),
        _ms("xl fp32 plain x2 flat", 653),
        _ms("xl fp32 plain x2 naive", 650),
        _ms("8b-32k bf16 fused step", 5661),
        _ms("8b-32k bf16 fused x2 sharded", 5810),
        Measurement(name="8b-32k bf16 fused peak", low=65.5 * 2**30, high=65.5 * 2**30, unit="B"),
        Measurement(name="8b-32k bf16 fused x2 sharded peak", low=40.9 * 2**30, high=40.9 * 2**30, unit="B"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device reaches; made by `rates`.

    Attributes:
        products_flops_per_second: by product dtype.
        fused_bytes_per_second, eager_bytes_per_second: of fused and of eager elementwise kernels.
        attention_pair_seconds: (constant, a unit of head width) by phase, a query-key pair of one head.
        host_kernel_seconds: a launched kernel by "forward", "backward", "optimizer".
        host_compiled_seconds: a forward-backward pass through compiled blocks, besides its launches.
        link_share: reached share of a link's promised bandwidth.
        collective_seconds: a collective, besides its bytes.
    """

    products_flops_per_second: dict[str, float]
    fused_bytes_per_second: float
    eager_bytes_per_second: float
    attention_pair_seconds: dict[str, tuple[float, float]]
    host_kernel_seconds: dict[str, float]
    host_compiled_seconds: float
    link_share: float
    collective_seconds: float
    notes: tuple[str, ...] = field(default=())


def _seconds(name: str) -> float:
    row = MEASUREMENTS[name]
    assert row.fits is not None, f"{name} is for validation, not for fitting"
    return row.middle


@cache
def fitted() -> Rates:
    """The rates of one H200, each from the measurements that name it."""
    h200 = get_device("h200")
    copy, bf16 = _seconds("copy"), _seconds("bf16 product, sustained")

    medium, compiled = get_model("medium"), EXECUTIONS["plain-compiled"]
    work = _pass_work(medium, "plain-compiled", "fp32", "forward")
    fp32 = work.product_flops / (_seconds("medium fp32 plain-compiled forward") - work.moved_bytes / copy)

    xl, plain = get_model("xl"), EXECUTIONS["plain"]
    eager = optimizer_work(xl, plain, "fp32").moved_bytes / _seconds("xl fp32 plain optimizer")

    large = get_model("large")
    host = {
        phase: _seconds(f"large amp-bf16 plain {phase}")
        / _pass_work(large, "plain", "amp-bf16", phase).kernels
        for phase in ("forward", "backward")
    }
    host["optimizer"] = _seconds("large amp-bf16 plain optimizer") / (
        plain.optimizer.kernels * tensors(large)
    )

    small = get_model("small")
    launched = sum(_pass_work(small, compiled.name, "amp-bf16", p).kernels for p in ("forward", "backward"))
    # What a compiled region launches runs without autograd's bookkeeping, as the optimizer's kernels do.
    entering = _seconds("small amp-bf16 plain-compiled forward_backward") - launched * host["optimizer"]

    pairs = 16 * 16384**2 / 2
    both = {h: _seconds(f"attention H{h} S16384 N16 forward_backward") / pairs for h in (64, 128)}
    forward_share = _seconds("attention H128 S16384 N16 forward") / pairs / both[128]
    slope = (both[128] - both[64]) / 64
    constant = both[64] - 64 * slope
    attention = {
        "forward": (forward_share * constant, forward_share * slope),
        "backward": ((1 - forward_share) * constant, (1 - forward_share) * slope),
    }

    large_call, small_call = _seconds("all-reduce 1GB x2"), _seconds("all-reduce 1MB x2")
    bandwidth = (10**9 - 10**6) / (large_call - small_call)  # two ranks: bus bandwidth = S/t
    return Rates(
        products_flops_per_second={"bf16": bf16, "fp16": bf16, "fp32": fp32},
        fused_bytes_per_second=copy,
        eager_bytes_per_second=eager,
        attention_pair_seconds=attention,
        host_kernel_seconds=host,
        host_compiled_seconds=entering,
        link_share=bandwidth / h200.links_bytes_per_second["nvlink"],
        collective_seconds=small_call - 10**6 / bandwidth,
    )


def _pass_work(config: ModelConfig, execution: str, dtype: str, phase: str) -> Work:
    """Work of all blocks and the head in one phase over the preset's batch."""
    row = EXECUTIONS[execution]
    total = head_work(config, row, dtype, sequences=config.batch_size, phase=phase)
    block = block_work(config, row, dtype, sequences=config.batch_size, phase=phase)
    for _ in range(config.n_layers):
        total = total + block
    return total


def rates(device: DeviceSpec, dtype: str) -> Rates:
    """The rates assumed of a device.

    On an H200 the fitted ones. Elsewhere each rate is the same share of the device's promise as on the H200:
    an extrapolation, said in `notes`. Host times stay as measured.

    Raises:
        ValueError: the device states no peak for the dtype.
    """
    base, h200 = fitted(), get_device("h200")
    product = dtype.removeprefix("amp-")
    peak = device.peak(dtype)
    if peak is None:
        raise ValueError(f"device {device.name!r} states no peak for {product}, so no time can be predicted")
    if product in base.products_flops_per_second:
        share, like = base.products_flops_per_second[product] / h200.peak_flops[product], product
    else:  # TF32, float64: no measurement; TF32 runs on the tensor cores, float64 beside them
        like = "bf16" if product == "tf32" else "fp32"
        share = base.products_flops_per_second[like] / h200.peak_flops[like]
    notes = []
    if device is not h200:
        notes.append(f"{device.name} is assumed to reach the shares of its peaks that an H200 reaches")
    if like != product:
        notes.append(f"{product} products are assumed to reach the share of peak that {like} products reach")
    memory = device.memory_bytes_per_second / h200.memory_bytes_per_second
    tensor_peak = device.peak("bf16") or device.peak("fp16")
    tensor = tensor_peak / h200.peak_flops["bf16"] if tensor_peak else 1.0
    return Rates(
        products_flops_per_second={product: share * peak},
        fused_bytes_per_second=base.fused_bytes_per_second * memory,
        eager_bytes_per_second=base.eager_bytes_per_second * memory,
        attention_pair_seconds={
            phase: (constant / tensor, slope / tensor)
            for phase, (constant, slope) in base.attention_pair_seconds.items()
        },
        host_kernel_seconds=base.host_kernel_seconds,
        host_compiled_seconds=base.host_compiled_seconds,
        link_share=base.link_share,
        collective_seconds=base.collective_seconds,
        notes=tuple(notes),
    )


def attention_seconds(given: Rates, pairs: float, head_dim: int, phase: str, dtype: str) -> float:
    """Seconds of flash attention over pairs times heads.

    16-bit kernels take a + b H a pair. In float32 and TF32 there is no such kernel: the products run at the
    dtype's own rate.
    """
    product = dtype.removeprefix("amp-")
    if product in ("bf16", "fp16"):
        constant, slope = given.attention_pair_seconds["backward" if phase == "backward" else "forward"]
        return pairs * (constant + slope * head_dim)
    flops = attention_kernel_flops(pairs, head_dim, phase)
    return flops / given.products_flops_per_second[product]
