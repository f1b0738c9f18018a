"""Seconds of one device's phases, from work and rates."""

from dataclasses import dataclass, fields

from trainstep.accounting.calibration import Rates, attention_seconds
from trainstep.accounting.execution import (
    Execution,
    Work,
    block_work,
    head_work,
    optimizer_work,
)
from trainstep.accounting.memory import state_precision
from trainstep.specs.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds of a device by what takes them; `host` is what launching adds to a device that waits for it."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return self.products + self.attention + self.elementwise + self.host

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def times(self, factor: float) -> "Spent":
        """The same work `factor` times."""
        return Spent(**{f.name: factor * getattr(self, f.name) for f in fields(self)})


def device_seconds(
    work: Work, given: Rates, *, dtype: str, head_dim: int, phase: str, compiled: bool
) -> Spent:
    """Time on the device alone: products, attention and elementwise kernels follow one another."""
    product = dtype.removeprefix("amp-")
    rate = given.fused_bytes_per_second if compiled else given.eager_bytes_per_second
    return Spent(
        products=work.product_flops / given.products_flops_per_second[product],
        attention=attention_seconds(given, work.attention_pairs, head_dim, phase, dtype),
        elementwise=work.moved_bytes / rate,
    )


def with_host(device: Spent, host_seconds: float) -> Spent:
    """A phase lasts as long as the slower of the device and of the host that feeds it."""
    return device + Spent(host=max(0.0, host_seconds - device.total))


def phase_seconds(
    config: ModelConfig,
    execution: Execution,
    given: Rates,
    *,
    dtype: str,
    phase: str,
    sequences: int,
    checkpoint: bool = False,
) -> Spent:
    """One phase of a step on one device.

    Args:
        phase: "forward", "backward" or "optimizer".
        checkpoint: backward runs every block's forward again.
    """
    if phase == "optimizer":
        work = optimizer_work(config, execution, state_precision(dtype))
        # A textbook update is a row of eager kernels also beside a compiled model.
        rate = (
            given.fused_bytes_per_second if execution.optimizer.kernels == 0 else given.eager_bytes_per_second
        )
        host = work.kernels * given.host_kernel_seconds["optimizer"]
        return with_host(Spent(elementwise=work.moved_bytes / rate), host)
    passes = ["recompute", "backward"] if phase == "backward" and checkpoint else [phase]
    device, host = Spent(), 0.0
    for part in passes:
        block = block_work(config, execution, dtype, sequences=sequences, phase=part)
        spent = device_seconds(
            block, given, dtype=dtype, head_dim=config.head_dim, phase=part, compiled=execution.compiled
        )
        device = device + spent.times(config.n_layers)
        host += config.n_layers * host_seconds(block, execution, given, part)
    head = head_work(config, execution, dtype, sequences=sequences, phase=phase)
    device = device + device_seconds(
        head, given, dtype=dtype, head_dim=config.head_dim, phase=phase, compiled=execution.compiled
    )
    host += host_seconds(head, execution, given, phase)
    if execution.compiled:
        host += given.host_compiled_seconds / 2 * len(passes)
    return with_host(device, host)


def host_seconds(work: Work, execution: Execution, given: Rates, phase: str) -> float:
    """Seconds in which the host launches the kernels of a phase.

    Compiled regions launch without autograd's bookkeeping, at the price of an optimizer's kernels.
    """
    eager = "forward" if phase == "recompute" else phase
    kind = "optimizer" if execution.compiled else eager
    return work.kernels * given.host_kernel_seconds[kind]


def step_seconds(
    config: ModelConfig,
    execution: Execution,
    given: Rates,
    *,
    dtype: str,
    sequences: int,
    checkpoint: bool = False,
) -> dict[str, Spent]:
    """All phases of a step on one device, with a synchronisation between them."""
    return {
        phase: phase_seconds(
            config,
            execution,
            given,
            dtype=dtype,
            phase=phase,
            sequences=sequences,
            checkpoint=checkpoint,
        )
        for phase in ("forward", "backward", "optimizer")
    }
