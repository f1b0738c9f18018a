"""A table on the page: sortable, filterable, with a copy of itself in every format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.measure.record import STATUSES
from benchmarks.report.chart import file_name
from benchmarks.report.facts import ABOVE_PEAK
from benchmarks.report.formats import FORMATS, format_frame, is_absent, is_number, plain
from benchmarks.report.html import Html, tag

if TYPE_CHECKING:
    from pandas import DataFrame

_FORMAT_NAMES = {"md": "Markdown", "tex": "LaTeX", "typ": "Typst", "csv": "CSV"}
_LONG_TEXT = {"reason", "notes", "finding", "commit", "check", "kernel", "operator", "lesson"}
_RATIOS = {"peer/ours"}
MANY_ROWS = 200  # from here on the browser lays a table out only when it comes into view


@dataclass
class Sheets:
    """The tables of one page: their texts for the copy buttons, by distinct ids."""

    texts: dict[str, dict[str, str]] = field(default_factory=dict)

    def sheet(
        self,
        name: str,
        frame: "DataFrame",
        *,
        title: str,
        context: Sequence[str] = (),
        extra: tuple[str, Callable[[int], Html]] | None = None,
        opens: Callable[[int], str | None] | None = None,
        tips: Sequence[str | None] = (),
    ) -> Html | None:
        """A DataFrame as a card with tools; None for an empty one.

        Args:
            name: distinct name; becomes the id and the exported file's name.
            frame: the table.
            title: above it.
            context: provenance lines below it.
            extra: a further column that only the page has: its name, and a cell for each row number.
            opens: the id of the chart that a row opens.
            tips: what pointing at each row shows, where it shows anything.
        """
        if frame.empty:
            return None
        identity = file_name(name, list(self.texts))
        self.texts[identity] = {key: format_frame(frame, key) for key in FORMATS}
        names = [str(column) for column in frame.columns]
        rows = [list(row) for row in frame.astype(object).itertuples(index=False, name=None)]
        # A column that is absent throughout says nothing on a page; the exports keep it.
        kept = [i for i in range(len(names)) if any(not is_absent(row[i]) for row in rows)]
        # A status that stands for a missing number keeps to the numbers' side.
        numeric = {
            i
            for i in kept
            if any(is_number(row[i]) for row in rows)
            and all(is_number(row[i]) or is_absent(row[i]) or row[i] in STATUSES for row in rows)
        }
        head = [_header(names[i], i in numeric) for i in kept]
        if extra:  # beside the first column, which names the row
            head.insert(1, tag("th", tag("span", extra[0], class_="eyebrow")))
        body = []
        for number, row in enumerate(rows):
            cells = [_cell(names[i], row[i], i in numeric) for i in kept]
            if extra:
                cells.insert(1, tag("td", extra[1](number)))
            wrong = "above-peak" if any(ABOVE_PEAK in str(value) for value in row) else None
            tip = tips[number] if tips else None
            opened = opens(number) if opens else None
            body.append(tag("tr", *cells, class_=wrong, data_open=opened, title=tip))
        tools = [tag("span", "Copy:")]
        tools += [tag("button", label, type="button", data_copy=key) for key, label in _FORMAT_NAMES.items()]
        filter_box = tag(
            "input", class_="filter", type="search", placeholder="Filter rows", aria_label=f"Filter {title}"
        )
        return tag(
            "div",
            tag("header", tag("h3", title), tag("div", *tools, class_="tools")),
            tag("div", filter_box, tag("span", f"{len(rows)} rows", class_="shown-rows"), class_="tools"),
            tag(
                "div",
                tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body)),
                class_="scroll",
                tabindex="0",
                role="region",
                aria_label=title,
            ),
            *(tag("div", line, class_="where") for line in context),
            class_="sheet big" if len(rows) > MANY_ROWS else "sheet",
            id=identity,
        )


def _header(name: str, numeric: bool) -> Html:
    return tag("th", tag("button", name, type="button"), class_="number" if numeric else None, scope="col")


def status_badge(status: str) -> Html:
    """A status as a word in a colored outline."""
    return tag("span", status, class_=f"status {status}") if status in STATUSES else tag("span", status)


def _cell(name: str, value: Any, numeric: bool) -> Html:
    if is_absent(value):
        return tag("td", plain(value), class_="absent number" if numeric else "absent")
    if name.endswith("status") or value in STATUSES:
        return tag("td", status_badge(str(value)), class_="number" if numeric else None)
    if is_number(value):
        side = "ahead" if name in _RATIOS and value >= 1 else "behind" if name in _RATIOS else ""
        shown = plain(value) + ("×" if name in _RATIOS else "")
        return tag("td", shown, class_=f"number {side}".strip())
    kind = "long" if name in _LONG_TEXT else "mono" if name in ("parameters", "case") else None
    return tag("td", plain(value), class_=kind)
