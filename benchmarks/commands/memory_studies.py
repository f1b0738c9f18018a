"""What `memory` answers: residuals of a block, predictions, policies measured, peaks by phase and
timelines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import memory as table
from benchmarks.cases.case import Case, parse_id
from benchmarks.measure.record import Row, destination, read_rows, safe_name
from benchmarks.measure.sampling import Policy

if TYPE_CHECKING:
    from pandas import DataFrame

GIB, MIB = 2**30, 2**20


def case_of(row: Row) -> Case:
    """The case that a row measured."""
    parsed = parse_id(row.case)
    policy = f"groups-{parsed['group']}" if "group" in parsed else parsed["target"]
    return table.case(
        policy,
        parsed["phase"],
        parsed["preset"],
        dtype=parsed["dtype"],
        batch=parsed["B"],
        context=parsed["S"],
    )


def expected_of(one: Case, device: str) -> table.Expected:
    """What the planner says of a case."""
    return table.predict(table.config_of(one), one.dtype, table.policy_of(one), one.phase, device)


def capacity_bytes(device: str) -> int | None:
    """Memory of the GPU; None for a CPU, whose memory other programs share."""
    if device != "cuda":
        return None
    import torch

    return torch.cuda.get_device_properties("cuda").total_memory


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A measured cell beside its prediction.

    Attributes:
        policy, phase, dtype, context: of the case.
        status, reason: of the row.
        predicted_bytes, recomputed_flops: the planner's; None where it could not measure a block.
        measured_bytes, seconds: None unless the row is ok.
        block_gradient_bytes: gradients of the first block, where there are some.
    """

    policy: str
    phase: str
    dtype: str
    context: int
    status: str
    reason: str | None
    predicted_bytes: float | None
    recomputed_flops: float | None
    measured_bytes: float | None = None
    seconds: float | None = None
    block_gradient_bytes: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured to predicted."""
        if self.measured_bytes is None or self.predicted_bytes is None:
            return None
        return self.measured_bytes / self.predicted_bytes


def cells_of(rows: Sequence[Row], device: str) -> list[Cell]:
    """Rows of this area as cells, each with the prediction of today's planner."""
    cells = []
    for row in rows:
        one = case_of(row)
        ok = row.status == "ok"
        expected = None
        try:
            expected = expected_of(one, device)
        except Exception:
            if ok:
                raise  # else the row says what is wrong, and the others are still wanted
        cells.append(
            Cell(
                policy=table.policy_of(one),
                phase=one.phase,
                dtype=one.dtype,
                context=one.shape["S"],
                status=row.status,
                reason=row.reason,
                predicted_bytes=None if expected is None else expected.peak_bytes,
                recomputed_flops=None if expected is None else expected.recomputed_flops,
                measured_bytes=_value(row, "peak_memory") if ok else None,
                seconds=min(row.samples_seconds) if row.samples_seconds else None,
                block_gradient_bytes=_value(row, "block_gradient"),
            )
        )
    return cells


def _value(row: Row, name: str) -> float | None:
    metric = row.metrics.get(name)
    return None if metric is None else metric["value"]


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def rows_so_far(
    cases: Sequence[Case], device: str, policy: Policy, machine: str | None, out: Path | None
) -> list[Row]:
    """Rows of a run that was interrupted, from the file from which the same command takes it up."""
    from benchmarks.cases.registries import ROOT
    from benchmarks.commands.measuring import run_id
    from benchmarks.measure.provenance import provenance

    path = out
    if path is None:
        facts = provenance(ROOT)
        name = safe_name(f"{run_id(cases, policy, device, facts)}.partial")
        path = destination(machine, facts.commit, ROOT / "results") / f"{name}.jsonl"
    return read_rows(path) if path.exists() else []


def cell_frame(cells: Sequence[Cell]) -> "DataFrame":
    """Cells as a table in the order given."""
    import pandas

    return pandas.DataFrame(
        [
            {
                "policy": cell.policy,
                "phase": cell.phase,
                "dtype": cell.dtype,
                "context": cell.context,
                "predicted GiB": _scaled(cell.predicted_bytes, 1 / GIB),
                "measured GiB": _scaled(cell.measured_bytes, 1 / GIB),
                "measured / predicted": cell.ratio,
                "recomputed TFLOP": _scaled(cell.recomputed_flops, 1e-12),
                "step ms": _scaled(cell.seconds, 1e3),
                "status": cell.status if cell.reason is None else f"{cell.status}: {cell.reason}",
            }
            for cell in cells
        ]
    )


def verdicts(cells: Sequence[Cell], capacity: int | None) -> list[str]:
    """What the cells of a policy sweep say of the planner, a sentence each, by dtype."""
    said = []
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        mine = [cell for cell in cells if cell.dtype == dtype]
        groups = [
            cell for cell in mine if cell.policy.startswith("groups-") and cell.predicted_bytes is not None
        ]
        measured = [cell for cell in groups if cell.measured_bytes is not None]
        if groups and measured:
            chosen = min(groups, key=lambda cell: cell.predicted_bytes or 0)
            least = min(measured, key=lambda cell: cell.measured_bytes or 0)
            agree = "which is" if chosen.policy == least.policy else f"but {least.policy} is"
            said.append(
                f"{dtype}: of the single-level policies the planner chooses {chosen.policy}, {agree} the "
                "measured minimum."
            )
        ratios = [(abs(cell.ratio - 1), cell.policy) for cell in mine if cell.ratio is not None]
        if ratios:
            worst, policy = max(ratios)
            within = sum(distance <= 0.1 for distance, _ in ratios)
            said.append(
                f"{dtype}: {within} of {len(ratios)} measured cells lie within 10% of their prediction; the "
                f"farthest is {policy} at {worst:.1%}."
            )
        if capacity is None:
            continue
        for cell in mine:
            if cell.predicted_bytes is None:
                continue
            fits, ran_out = cell.predicted_bytes <= capacity, cell.status == "oom"
            if not fits or ran_out:
                words = "more than" if not fits else "no more than"
                did = "ran out of memory" if ran_out else f"ended as {cell.status}"
                said.append(
                    f"{dtype}: {cell.policy} is predicted to need {cell.predicted_bytes / GIB:.1f} GiB, "
                    f"{words} the device's {capacity / GIB:.1f} GiB, and {did}."
                )
    return said


def gradient_line(config: Any, dtype: str, cells: Sequence[Cell]) -> str | None:
    """Gradient bytes of one block, predicted (2D^2 + 2DKH + 3DF + norms) and measured."""
    from trainstep.specs.dtype import get_dtype

    measured = next((cell.block_gradient_bytes for cell in cells if cell.block_gradient_bytes), None)
    d, f, kv = config.d_model, config.d_ff, config.kv_heads * config.head_dim
    norms = 2 * d + (2 * config.head_dim if config.qk_norm else 0)
    predicted = (2 * d * d + 2 * d * kv + 3 * d * f + norms) * get_dtype(dtype).bytes
    said = f"{dtype}: gradients of one block: predicted {predicted} bytes ({predicted / MIB:.2f} MiB), "
    return said + ("not measured." if measured is None else f"measured {measured:.0f} bytes.")


def residuals_of_block(config: Any, dtype: str, device: str, compiled: bool) -> Any:
    """Residuals of one block at its real size, on the meta device where attention can.

    Compiled residuals come from the compiler's partitioner alone, which decides them; no code is generated.

    Raises:
        ValueError: autocast on a device that has none.
    """
    import contextlib

    import torch

    from trainstep.memory.residuals import record_residuals
    from trainstep.model.transformer import TransformerLM
    from trainstep.specs.dtype import get_dtype

    spec = get_dtype(dtype)
    where = "cpu" if device == "cpu" else device
    where = table.measuring_device(config.attention, dtype, where)
    parameters = getattr(torch, spec.torch_name)
    block = TransformerLM(config.with_overrides(n_layers=1), device=where, dtype=parameters).blocks[0]
    shape = (config.batch_size, config.context_length, config.d_model)
    x = torch.zeros(shape, device=where, dtype=parameters, requires_grad=True)
    if compiled:
        torch.compiler.reset()
        block.compile(backend="aot_eager_decomp_partition", dynamic=False, fullgraph=True)
    region: Any = contextlib.nullcontext()
    if spec.autocast:
        region = torch.autocast(where, dtype=getattr(torch, spec.autocast))
    with record_residuals(block) as recorder, region:
        y = block(x)
    found = recorder.residuals()
    del y
    return found


def residual_frames(residuals: Any) -> tuple["DataFrame", "DataFrame"]:
    """(every storage once, largest first; the five largest operations with their share)."""
    import pandas

    storages = sorted(residuals.storages, key=lambda save: -save.bytes)
    each = [
        {
            "MiB": save.bytes / MIB,
            "shape": "x".join(map(str, save.shape)),
            "dtype": str(save.dtype).removeprefix("torch."),
            "operation": save.operation,
            "module": save.module,
            "kind": save.kind,
        }
        for save in storages
    ]
    largest = [
        {
            "operation": share.operation,
            "saves": share.saves,
            "MiB": share.bytes / MIB,
            "share %": share.share * 100,
        }
        for share in residuals.largest_operations()
    ]
    return pandas.DataFrame(each), pandas.DataFrame(largest)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A recorded step: its timeline, the policy that made it fit, and the files written."""

    timeline: Any
    policy: str
    files: tuple[Path, ...]


def record_step(one: Case, device: str, folder: Path) -> Picture:
    """Record the allocations of one step, as a snapshot for the viewer and as a picture.

    A warm-up step comes first, so that optimizer state exists. A step that runs out of memory without
    checkpointing is recorded with every block checkpointed instead.

    Raises:
        torch.OutOfMemoryError, HostMemoryError: it does not fit either way.
    """
    from benchmarks.measure.memory import is_out_of_memory, release

    try:
        return _record(one, table.policy_of(one), device, folder)
    except Exception as error:
        if not is_out_of_memory(error) or table.policy_of(one) != "none" or one.phase == "inference":
            raise
    release(device)  # outside the handler, whose traceback would hold the failed step
    return _record(one, "every-block", device, folder)


def _record(one: Case, policy: str, device: str, folder: Path) -> Picture:
    from benchmarks.report.chart import file_name
    from benchmarks.report.memory_charts import memory_chart
    from benchmarks.report.plots import save
    from trainstep.memory.snapshot import record_history, timeline

    config = table.config_of(one)
    if device == "cpu":  # neither policy takes of a GPU's host
        table.require_host_memory(table.predict(config, one.dtype, policy, one.phase, device), device)
    step = table.build(config, one.dtype, device, policy)
    parts = table.parts_of(step, one.phase)
    for _, part in parts:
        part()
    step.reset_gradients()
    step.loss = None
    title = f"{one.shape['preset']} {one.phase}, context {one.shape['S']}, {one.dtype}, {policy}"
    path = folder / f"{file_name(title)}.pickle"
    with record_history(device, path, table.resident(step)) as history:
        for name, part in parts:
            history.phase(name)
            part()
    seen = timeline(history.snapshot)
    chart = memory_chart(seen.thinned(), phases=seen.phases, title=f"Active memory: {title}")
    return Picture(timeline=seen, policy=policy, files=(path, *save(chart, folder)))


def allocation_frame(timeline: Any) -> "DataFrame":
    """The largest allocations with the Python frame that made them."""
    import pandas

    return pandas.DataFrame(
        [
            {"MiB": a.bytes / MIB, "times": a.count, "phase": a.phase, "made by": a.frame}
            for a in timeline.allocations
        ]
    )
