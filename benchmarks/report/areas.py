"""Areas with charts and tables of their own, each a section of the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.report import charts, lane_charts, memory_charts, memory_tables, tables
from benchmarks.report.chart import Chart
from benchmarks.report.facts import Facts, contexts
from benchmarks.report.html import join, tag
from benchmarks.report.parts import Page, Section, named, renamed
from benchmarks.report.tables import IsPeer

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True)
class Area:
    """An area with charts and tables of its own: which rows, what it is called, how to read it."""

    names: tuple[str, ...]
    title: str
    lede: str


AREAS = {
    "attention": Area(
        names=tables.ATTENTION_AREAS,
        title="Attention",
        lede="Rates count only the query-key pairs that the mask leaves visible. A cross on a chart's lower "
        "edge is a run without a result; point at it for the reason.",
    ),
    "step": Area(
        names=tables.STEP_AREAS,
        title="Training step",
        lede="Forward, backward and optimizer timed apart, the total in a pass of its own. MFU is given only "
        "where the device's peak is known.",
    ),
    "collective": Area(
        names=tables.COLLECTIVE_AREAS,
        title="Collectives",
        lede="The time is the slowest rank's. Bus bandwidth allows rank counts to be compared; a GB is 10^9 "
        "bytes.",
    ),
    "parallel": Area(
        names=("data_parallel",),
        title="Data parallelism",
        lede="What a step spends on communication, and how much of it runs behind the computation.",
    ),
    "sharding": Area(
        names=("sharding",),
        title="Sharding",
        lede="Optimizer state, gradients and parameters spread over ranks: what a step takes, and what a rank holds.",
    ),
    "policies": Area(
        names=tables.MEMORY_AREAS,
        title="Peak memory",
        lede="What a step holds at most under each checkpointing policy, beside the planner's prediction.",
    ),
}


def _drawn(name: str, chosen: Sequence[Facts], is_peer: IsPeer) -> list[Chart]:
    """The charts of an area."""
    if name == "attention":
        return charts.attention_charts(chosen, is_peer)
    if name == "step":
        return charts.step_charts(chosen)
    if name == "collective":
        return charts.collective_charts(chosen, is_peer)
    if name == "policies":
        return memory_charts.peak_charts(chosen)
    if name == "sharding":
        return [
            *charts.parallel_charts(chosen),
            *memory_charts.component_charts(chosen),
            *lane_charts.lane_charts(chosen),
        ]
    return [*charts.parallel_charts(chosen), *lane_charts.lane_charts(chosen)]


def _tabulated(name: str, chosen: Sequence[Facts], is_peer: IsPeer) -> list[tuple[str, str, "DataFrame"]]:
    """The tables of an area: name, title, table."""
    if name == "attention":
        unit = tables.rate_unit(chosen)[1]
        return [
            ("rates", f"{unit} of each implementation", tables.attention_rates(chosen)),
            ("attention", "Every attention row", tables.attention(chosen)),
        ]
    if name == "step":
        return [("steps", "Steps by phase", tables.steps(chosen))]
    if name == "collective":
        return [("collectives", "Collectives", tables.collectives(chosen))]
    if name == "policies":
        return [("memory", "Peak memory", memory_tables.memory(chosen))]
    if name == "sharding":
        return [
            ("sharding", "Sharded variants", tables.parallel(chosen, is_peer)),
            ("components", "Everything measured about them", tables.every_row(chosen)),
        ]
    return [("parallel", "Data-parallel variants", tables.parallel(chosen, is_peer))]


def area_section(page: Page, identity: str, name: str, facts: Sequence[Facts]) -> Section | None:
    area = AREAS[name]
    chosen = [fact for fact in facts if fact.area in area.names]
    if not chosen:
        return None
    figures = [page.figure(renamed(chart, identity, page)) for chart in _drawn(name, chosen, page.is_peer)]
    sheets = [
        page.sheets.sheet(named(identity, short), frame, title=title, context=contexts(chosen))
        for short, title, frame in _tabulated(name, chosen, page.is_peer)
    ]
    content = join([tag("div", *figures, class_="figures") if any(figures) else None, *sheets])
    return Section(
        id=f"{identity}--{name}", title=area.title, lede=area.lede, content=content, count=str(len(chosen))
    )
