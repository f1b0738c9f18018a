"""The history of a machine on the page: what regressed, one large chart, and every case with its course."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure.record import Row
from benchmarks.report import trends
from benchmarks.report.html import Html, join, tag
from benchmarks.report.parts import Page, Section, named
from benchmarks.report.trends import Commit, Trend


def findings_banner(page: Page, identity: str, findings: Sequence[Mapping[str, Any]]) -> Html | None:
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


def history_section(
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
        named(identity, "history"),
        trends.trend_table(found, page.commits),
        title="Every case over the commits: choose a row to see it above",
        extra=("trend", lambda number: sparkline(found[number], page.commits)),
        opens=lambda number: ids[number],
    )
    alarms = page.sheets.sheet(
        named(identity, "regressions"), trends.finding_table(findings, page.commits), title="Regressions"
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
        for run in runs
        for step, index in enumerate(run)
    )

    def dot(index: int, radius: float, color: str) -> Html:
        x, y = place(index)
        return tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=str(radius), fill=color)

    position = {commit.sha: index for index, commit in enumerate(commits)}
    dots = [dot(run[0], 1.8, "currentColor") for run in runs if len(run) == 1]
    dots += [
        dot(at, 3, "var(--bad)" if trends.sure(finding) else "var(--warn)")
        for finding in trend.findings
        for at in [position.get(finding["commits"][-1], -1)]
        if at in trend.values
    ]
    line = tag("path", d=path, fill="none", stroke="currentColor", stroke_width="2", stroke_linecap="round")
    return tag("svg", line, *dots, viewBox="0 0 120 24", class_="spark", aria_hidden="true")
