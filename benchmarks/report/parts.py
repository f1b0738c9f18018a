"""What every section of the page is made with: the page's collections, a section, names of charts and tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.report.chart import Chart, file_name
from benchmarks.report.html import Html, tag
from benchmarks.report.sheets import Sheets
from benchmarks.report.tables import IsPeer
from benchmarks.report.trends import Commit


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
            class_=kind or ("wide" if chart.kind == "lanes" else None),
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


def named(identity: str, name: str) -> str:
    """A table's or chart's name with its machine's, as in the files it is exported to."""
    return f"{identity.removeprefix('machine--')} {name}"


def renamed(chart: Chart, identity: str, page: Page) -> Chart:
    """The chart under an id that is distinct on the page: two machines draw the same charts."""
    return replace(chart, id=file_name(named(identity, chart.id), list(page.charts)))
