"""Measured step times beside what the model of this package predicts for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trainstep.accounting import params
from trainstep.accounting.calibration import MEASUREMENTS, Measurement, fitted, rates
from trainstep.accounting.collectives import ring_seconds
from trainstep.accounting.execution import get_execution, tensors
from trainstep.accounting.layout import Layout, Plan
from trainstep.accounting.planner import evaluate
from trainstep.accounting.question import ask
from trainstep.accounting.step_time import step_seconds
from trainstep.specs.device import get_device
from trainstep.specs.model import get_model

DEVICE = "h200"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One measured figure and its prediction, in `measured.unit`.

    Attributes:
        shares: measurements that both this prediction's fit and the figure itself contain, "" for none.
    """

    measured: Measurement
    predicted: float
    shares: str = ""

    @property
    def error(self) -> float:
        """Relative to the measured figure, or to the nearer end of a measured range; 0 within it."""
        nearest = min(max(self.predicted, self.measured.low), self.measured.high)
        return self.predicted / nearest - 1


def _single(name: str) -> float:
    preset, dtype, execution, _ = name.split()
    config = get_model(preset)
    spent = step_seconds(
        config,
        get_execution(execution),
        rates(get_device(DEVICE), dtype),
        dtype=dtype,
        sequences=config.batch_size,
        checkpoint=preset == "8b-32k",
    )
    return sum(phase.total for phase in spent.values())


def _data_parallel(synchronise: str) -> float:
    """xl on two devices, one half of the batch each, gradients synchronised in one of three ways."""
    asked = ask(get_model("xl"), devices=2, batch=4, dtype="fp32", execution="plain")
    plan = evaluate(asked, Layout(data=2, microbatch=2))
    if synchronise == "overlapped":
        return plan.seconds
    gradient_bytes = 4 * params.count(asked.config)
    link = asked.network.levels[0].bytes_per_second
    sent = ring_seconds("all_reduce", gradient_bytes, 2, link)
    if synchronise == "naive":  # one call a tensor
        communication = sent + tensors(asked.config) * asked.rates.collective_seconds
    else:  # flat: copied into one buffer and back, every byte read and written
        communication = (
            sent + asked.rates.collective_seconds + 4 * gradient_bytes / asked.rates.fused_bytes_per_second
        )
    return plan.seconds - plan.parts["gradients"] + communication


def _all_reduce(megabytes: int) -> float:
    given = fitted()
    link = get_device(DEVICE).links_bytes_per_second["nvlink"] * given.link_share
    return given.collective_seconds + ring_seconds("all_reduce", megabytes * 1e6, 2, link)


def _long_context(devices: int) -> Plan:
    """The 8b-32k step with one sequence a device, checkpointed, sharded where there are two."""
    asked = ask(get_model("8b-32k"), devices=devices)
    return evaluate(asked, Layout(data=devices, shard=devices, checkpoint=True))


_OPTIMIZER = "its optimizer"
PREDICTIONS: Mapping[str, tuple[Callable[[], float], str]] = MappingProxyType(
    {
        "all-reduce 10MB x2": (lambda: _all_reduce(10), ""),
        "all-reduce 100MB x2": (lambda: _all_reduce(100), ""),
        "small amp-bf16 plain step": (lambda: _single("small amp-bf16 plain step"), ""),
        "small amp-bf16 plain-compiled step": (
            lambda: _single("small amp-bf16 plain-compiled step"),
            "its forward and backward",
        ),
        "medium fp32 plain step": (lambda: _single("medium fp32 plain step"), ""),
        "medium fp32 plain-compiled step": (
            lambda: _single("medium fp32 plain-compiled step"),
            "its forward",
        ),
        "medium amp-bf16 plain step": (lambda: _single("medium amp-bf16 plain step"), ""),
        "medium amp-bf16 plain-compiled step": (lambda: _single("medium amp-bf16 plain-compiled step"), ""),
        "large fp32 plain step": (lambda: _single("large fp32 plain step"), ""),
        "xl fp32 plain step": (lambda: _single("xl fp32 plain step"), _OPTIMIZER),
        "xl fp32 plain-compiled step": (lambda: _single("xl fp32 plain-compiled step"), _OPTIMIZER),
        "xl amp-bf16 plain step": (lambda: _single("xl amp-bf16 plain step"), _OPTIMIZER),
        "xl fp32 plain x2 overlapped": (lambda: _data_parallel("overlapped"), _OPTIMIZER),
        "xl fp32 plain x2 flat": (lambda: _data_parallel("flat"), _OPTIMIZER),
        "xl fp32 plain x2 naive": (lambda: _data_parallel("naive"), _OPTIMIZER),
        "8b-32k bf16 fused step": (lambda: _single("8b-32k bf16 fused step"), ""),
        "8b-32k bf16 fused x2 sharded": (lambda: _long_context(2).seconds, ""),
        "8b-32k bf16 fused peak": (lambda: _long_context(1).memory_bytes, ""),
        "8b-32k bf16 fused x2 sharded peak": (lambda: _long_context(2).memory_bytes, ""),
    }
)


def comparisons() -> list[Comparison]:
    """Every measured figure that is predicted, in the table's order."""
    return [
        Comparison(measured=MEASUREMENTS[name], predicted=predict(), shares=shares)
        for name, (predict, shares) in PREDICTIONS.items()
    ]
