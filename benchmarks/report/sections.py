"""The parts of the page for one machine: headline, areas with charts and tables, history, failures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from benchmarks.measure.record import STATUSES, Row
from benchmarks.report import charts, tables, trends
from benchmarks.report.cards import card, headline_groups
from benchmarks.report.chart import Chart, file_name
from benchmarks.report.facts import Facts, context_of, contexts, latest
from benchmarks.report.html import Html, join, tag
from benchmarks.report.sheets import Sheets, status_badge
from benchmarks.report.tables import IsPeer
from benchmarks.report.trends import Commit, Trend

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass
class Page:
    """What gathers while sections are made: charts and tables by distinct ids."""

    is_peer: IsPeer
    commits: Sequence[Commit]
    sheets: Sheets = field(default_factory=Sheets)
    charts: dict[str, Chart] = field(default_factory=dict)
    figures: list[str] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)

    def figure(self, chart: Chart, *, kind: str | None = None) -> Html | None:
        """A chart's place on the page; None when it has nothing to show."""
        if chart.empty and kind is None:
            return None
        self.charts[chart.id] = chart
        self.figures.append(chart.id)
        return tag(
            "figure",
            tag("header", tag("h3", chart.title)),
            tag("div", class_="canvas", role="group", aria_label=chart.title),
            tag("figcaption", chart.caption),
            tag("div", "\n".join(chart.context), class_="where", style="white-space:pre-line"),
            class_=kind,
            data_chart=chart.id,
        )


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page with its entry in the navigation."""

    id: str
    title: str
    lede: str
    content: Html
    count: str = ""

    @property
    def html(self) -> Html:
        header = tag(
            "header", tag("h2", self.title), tag("p", self.lede, class_="lede") if self.lede else None
        )
        return tag("section", header, self.content, id=self.id)


def machine_sections(
    page: Page, rows: Sequence[Row], findings: Sequence[Mapping[str, Any]], timelines: Sequence[Chart]
) -> tuple[str, list[Section], Html]:
    """Everything about one machine: its id on the page, its sections, and its markup."""
    machine = rows[0].machine
    slug = file_name(machine, page.machines)
    page.machines.append(slug)
    identity = f"machine--{slug}"  # two hyphens in a row: no table and no chart is named so
    facts = latest(rows)
    made = [
        _headline(page, identity, facts),
        *(_area(page, identity, name, facts) for name in _AREAS),
        _others(page, identity, facts),
        _memory(page, identity, timelines),
        _history(page, identity, rows, findings),
        _statuses(page, identity, facts),
    ]
    sections = [section for section in made if section is not None]
    body = tag(
        "div",
        _hero(machine, facts),
        _findings(page, identity, findings),
        *(s.html for s in sections),
        id=identity,
        class_="machine",
    )
    return identity, sections, body


def _named(identity: str, name: str) -> str:
    """A table's or chart's name with its machine's, as in the files it is exported to."""
    return f"{identity.removeprefix('machine--')} {name}"


def _hero(machine: str, facts: Sequence[Facts]) -> Html:
    newest = max((fact.row for fact in facts), key=lambda row: (row.suite != "asv", row.started_at))
    chips = [
        tag("span", f"{key} ", tag("b", value), class_="chip") for key, value in context_of(newest).items()
    ]
    counts = Counter(fact.row.status for fact in facts)
    badges = [tag("span", status_badge(s), f" {counts[s]}", class_="chip") for s in STATUSES if counts[s]]
    return tag(
        "div",
        tag("div", "machine", class_="eyebrow"),
        tag("h1", machine),
        tag("div", *chips[1:], class_="chips"),
        tag("div", *badges, class_="chips", aria_label="rows by status"),
        class_="hero",
    )


def _findings(page: Page, identity: str, findings: Sequence[Mapping[str, Any]]) -> Html | None:
    """Regressions as an alarm; what too few processes hint at as a quieter note below."""
    blocks = []
    for certain in (True, False):
        chosen = [f for f in findings if trends.sure(f) == certain]
        if not chosen:
            continue
        lines = [
            tag(
                "div",
                tag("strong", "▲ " if certain else "△ ", trends.verdict(f)),
                tag("span", f["case"], class_="mono"),
                tag("span", "since ", tag("b", trends.blamed(f, page.commits))),
                class_="finding",
            )
            for f in chosen
        ]
        number = f"{len(chosen)} {'' if certain else 'possible '}regression{'s' if len(chosen) > 1 else ''}"
        why = None if certain else "Too few processes were measured to be sure; the gate measures again."
        link = tag("a", "See the history", href=f"#{identity}--history")
        blocks.append(
            tag(
                "div",
                tag("h3", number),
                tag("p", why, class_="lede") if why else None,
                *(lines if certain else [tag("details", tag("summary", "Which"), *lines)]),
                link,
                class_="banner" if certain else "banner possible",
                role="status",
            )
        )
    return join(blocks) if blocks else None


def _headline(page: Page, identity: str, facts: Sequence[Facts]) -> Section | None:
    groups = headline_groups(facts, page.is_peer)
    frame = tables.headline(facts, page.is_peer)
    sheet = page.sheets.sheet(
        _named(identity, "headline"),
        frame,
        title="Every case beside the best peer of its run",
        context=contexts(facts),
    )
    pairs = page.sheets.sheet(
        _named(identity, "peers"),
        tables.beside_peers(facts, page.is_peer),
        title="Peer over ours, for every peer",
    )
    if sheet is None:
        return None
    return Section(
        id=f"{identity}--headline",
        title="Beside the peers",
        lede="A peer is what one would use instead. Ratios compare medians of the same run: 2× takes half "
        "the peer's time. Blue bars are ours, gray ones peers. Each card shows the largest configuration "
        "of its kind.",
        content=join(
            [
                tag("div", *(card(group, page.is_peer) for group in groups), class_="cards")
                if groups
                else None,
                sheet,
                tag("details", tag("summary", "Every pair"), pairs) if pairs else None,
            ]
        ),
        count=str(len(frame)),
    )


@dataclass(frozen=True, kw_only=True)
class _Area:
    """An area with charts and tables of its own: which rows, what it is called, how to read it."""

    names: tuple[str, ...]
    title: str
    lede: str


_AREAS = {
    "attention": _Area(
        names=tables.ATTENTION_AREAS,
        title="Attention",
        lede="Rates count only the query-key pairs that the mask leaves visible. A cross on a chart's lower "
        "edge is a run without a result; point at it for the reason.",
    ),
    "step": _Area(
        names=tables.STEP_AREAS,
        title="Training step",
        lede="Forward, backward and optimizer timed apart, the total in a pass of its own. MFU is given only "
        "where the device's peak is known.",
    ),
    "collective": _Area(
        names=tables.COLLECTIVE_AREAS,
        title="Collectives",
        lede="The time is the slowest rank's. Bus bandwidth allows rank counts to be compared; a GB is 10^9 "
        "bytes.",
    ),
    "parallel": _Area(
        names=tables.PARALLEL_AREAS,
        title="Data parallelism",
        lede="What a step spends on communication, and how much of it runs behind the computation.",
    ),
    "policies": _Area(
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
        return charts.policy_charts(chosen)
    return charts.parallel_charts(chosen)


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
        return [("memory", "Peak memory", tables.memory(chosen))]
    return [("parallel", "Data-parallel variants", tables.parallel(chosen, is_peer))]


def _area(page: Page, identity: str, name: str, facts: Sequence[Facts]) -> Section | None:
    area = _AREAS[name]
    chosen = [fact for fact in facts if fact.area in area.names]
    if not chosen:
        return None
    figures = [page.figure(_renamed(chart, identity, page)) for chart in _drawn(name, chosen, page.is_peer)]
    sheets = [
        page.sheets.sheet(_named(identity, short), frame, title=title, context=contexts(chosen))
        for short, title, frame in _tabulated(name, chosen, page.is_peer)
    ]
    content = join([tag("div", *figures, class_="figures") if any(figures) else None, *sheets])
    return Section(
        id=f"{identity}--{name}", title=area.title, lede=area.lede, content=content, count=str(len(chosen))
    )


def _renamed(chart: Chart, identity: str, page: Page) -> Chart:
    """The chart under an id that is distinct on the page: two machines draw the same charts."""
    return replace(chart, id=file_name(_named(identity, chart.id), list(page.charts)))


def _others(page: Page, identity: str, facts: Sequence[Facts]) -> Section | None:
    chosen = [fact for fact in facts if not any(fact.area in area.names for area in _AREAS.values())]
    if not chosen:
        return None
    sheet = page.sheets.sheet(
        _named(identity, "others"), tables.every_row(chosen), title="Other cases", context=contexts(chosen)
    )
    return Section(
        id=f"{identity}--others", title="Other cases", lede="", content=join([sheet]), count=str(len(chosen))
    )


def _memory(page: Page, identity: str, timelines: Sequence[Chart]) -> Section | None:
    figures = [page.figure(_renamed(chart, identity, page)) for chart in timelines]
    if not any(figures):
        return None
    return Section(
        id=f"{identity}--memory",
        title="Memory over time",
        lede="Active memory while a step runs, with its phases.",
        content=tag("div", *figures, class_="figures"),
        count=str(len(timelines)),
    )


def _history(
    page: Page, identity: str, rows: Sequence[Row], findings: Sequence[Mapping[str, Any]]
) -> Section | None:
    found = [
        trend
        for trend in trends.trends(rows, page.commits, findings)
        if trend.values and (len(trend.rows) > 1 or trend.findings)
    ]
    if not found:
        return None
    ids = []
    for trend in found:
        chart = trends.trend_chart(trend, page.commits, list(page.charts))
        page.charts[chart.id] = chart
        ids.append(chart.id)
    viewer = page.figure(page.charts[ids[0]], kind="viewer")
    sheet = page.sheets.sheet(
        _named(identity, "history"),
        trends.trend_table(found, page.commits),
        title="Every case over the commits: choose a row to see it above",
        extra=("trend", lambda number: sparkline(found[number], page.commits)),
        opens=lambda number: ids[number],
    )
    alarms = page.sheets.sheet(
        _named(identity, "regressions"), trends.finding_table(findings, page.commits), title="Regressions"
    )
    return Section(
        id=f"{identity}--history",
        title="History",
        lede="Commits in first-parent order, oldest first. Drag over the chart to zoom, double-click to see "
        "all. A commit without a result is a gap and widens the range of a regression.",
        content=join([alarms, viewer, sheet]),
        count=f"{sum(bool(t.findings) for t in found)} marked" if findings else str(len(found)),
    )


def sparkline(trend: Trend, commits: Sequence[Commit]) -> Html:
    """The course of a trend in a line of text's height; gaps stay open, a blamed commit is a dot."""
    low, high = min(trend.rows), max(trend.rows)
    least, most = min(trend.values.values()), max(trend.values.values())
    span = max(most - least, 0.1 * most, 1e-12)

    def place(index: int) -> tuple[float, float]:
        x = 4 + 112 * (index - low) / max(1, high - low)
        return x, 20 - 16 * (trend.values[index] - least) / span

    runs: list[list[int]] = [[]]
    for index in range(low, high + 1):
        if index in trend.values:
            runs[-1].append(index)
        elif runs[-1]:
            runs.append([])
    path = "".join(
        f"{'M' if step == 0 else 'L'}{place(index)[0]:.1f} {place(index)[1]:.1f}"
        + ("h0.01" if len(run) == 1 else "")  # a lone point is drawn by its round cap
        for run in runs
        for step, index in enumerate(run)
    )
    position = {commit.sha: index for index, commit in enumerate(commits)}
    dots = [
        tag(
            "circle",
            cx=f"{place(at)[0]:.1f}",
            cy=f"{place(at)[1]:.1f}",
            r="3",
            fill="var(--bad)" if trends.sure(finding) else "var(--warn)",
        )
        for finding in trend.findings
        for at in [position.get(finding["commits"][-1], -1)]
        if at in trend.values
    ]
    line = tag("path", d=path, fill="none", stroke="currentColor", stroke_width="2", stroke_linecap="round")
    return tag("svg", line, *dots, viewBox="0 0 120 24", class_="spark", aria_hidden="true")


def _statuses(page: Page, identity: str, facts: Sequence[Facts]) -> Section | None:
    sheet = page.sheets.sheet(
        _named(identity, "statuses"),
        tables.statuses(facts),
        title="Rows without a result",
        context=contexts(facts),
    )
    if sheet is None:
        return None
    return Section(
        id=f"{identity}--statuses",
        title="Without a result",
        lede="oom: out of memory. error: failed. skipped: cannot run on this machine. red: differs from the "
        "reference, so no speed is reported.",
        content=sheet,
        count=str(sum(fact.row.status != "ok" for fact in facts)),
    )
