"""One self-contained HTML page made from rows: it opens from file:// with no network.

Everything is inside: style, script, data. A content security policy allows the page's own script by its hash
and nothing else, so that text from outside could not run even if an escape were forgotten.
"""

import base64
import gzip
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.record import AGAIN, Row
from benchmarks.report.chart import Chart
from benchmarks.report.html import Html, embedded_json, join, tag
from benchmarks.report.parts import Page, Section
from benchmarks.report.sections import machine_sections
from benchmarks.report.style import DARK, LIGHT, Theme
from benchmarks.report.tables import IsPeer
from benchmarks.report.trends import Commit

ASSETS = Path(__file__).with_name("assets")
SCRIPTS = ("charts.js", "figures.js", "page.js")
_LOGO = Html(
    '<svg viewBox="0 0 24 24" aria-hidden="true"><path d="M2 20h5v-5h5v-5h5V5h5" fill="none" '
    'stroke="var(--accent)" stroke-width="3" stroke-linejoin="round" stroke-linecap="round"/></svg>'
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A page and what is on it.

    Attributes:
        html: the whole page.
        tables: table id -> format -> text.
        figures: the charts that stand on the page, in order.
    """

    html: str
    tables: Mapping[str, Mapping[str, str]]
    figures: Sequence[Chart]


def build_page(
    rows: Sequence[Row],
    *,
    is_peer: IsPeer,
    commits: Sequence[Commit] = (),
    findings: Iterable[Mapping[str, Any]] = (),
    damaged: Sequence[str] = (),
    links: Sequence[tuple[str, str]] = (),
) -> Made:
    """Make the page from rows.

    Args:
        rows: every row to show, of any machine.
        is_peer: whether a target of an area is somebody else's work.
        commits: first-parent history, oldest first.
        findings: the gate's regressions: dicts with "case", "commits" (hashes, oldest first: one blamed, or a
            range), "ratio" (new over old seconds) and, where several machines are shown, "machine".
        damaged: a line for each result file that could not be read.
        links: further pages beside this one, as (text, relative address).
    """
    measured: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        measured[row.machine].append(row)
    # What a gate measured again speaks through the findings and the history; alone it makes no machine.
    by_machine = {m: found for m, found in measured.items() if any(row.suite != AGAIN for row in found)}
    found = list(findings)
    page = Page(is_peer=is_peer, commits=commits)
    machines: list[tuple[str, str, list[Section], Html]] = []
    # Machines with a regression first, then those measured last.
    order = sorted(by_machine, key=lambda m: max(row.started_at for row in by_machine[m]), reverse=True)
    for machine in sorted(order, key=lambda m: not _of(found, m, by_machine)):
        identity, sections, body = machine_sections(
            page, by_machine[machine], _of(found, machine, by_machine)
        )
        machines.append((identity, machine, sections, body))
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = "(() => {\n" + script + "\n})();"
    document = tag(
        "html",
        _head(script),
        tag(
            "body",
            tag("a", "Skip to the results", href="#main", class_="skip"),
            tag("div", _side(machines, links), _main(machines, damaged), class_="layout"),
            embedded_json({"light": asdict(LIGHT), "dark": asdict(DARK)}, id="themes"),
            embedded_json([chart.to_json() for chart in page.charts.values()], id="charts"),
            embedded_json(_packed(page.sheets.texts), id="tables"),
            tag("script", Html(script)),
        ),
        lang="en",
    )
    figures = [page.charts[name] for name in page.figures]
    return Made(html="<!doctype html>\n" + document, tables=page.sheets.texts, figures=figures)


def _packed(texts: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The copies of each table, all formats, as base64 of gzip of JSON: a tenth of their size."""
    packed = {}
    for name, formats in texts.items():
        data = json.dumps(formats, ensure_ascii=False).encode("utf-8", "backslashreplace")
        packed[name] = base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()
    return packed


def _of(
    findings: Sequence[Mapping[str, Any]], machine: str, by_machine: Mapping[str, Sequence[Row]]
) -> list[Mapping[str, Any]]:
    """The findings about a machine: those that name it, or none and a case that it has measured."""
    cases = {row.case for row in by_machine[machine]}
    return [f for f in findings if f.get("machine", machine) == machine and f["case"] in cases]


def _head(script: str) -> Html:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src 'sha256-{digest}'"
    )
    dark = f"color-scheme:dark;{_variables(DARK)}"
    style = (
        f":root{{color-scheme:light;{_variables(LIGHT)}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}\n"
    )
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", "trainstep benchmarks"),
        tag("style", Html(style + (ASSETS / "page.css").read_text(encoding="utf-8"))),
    )


def _variables(theme: Theme) -> str:
    return "".join(f"--{key}:{value};" for key, value in asdict(theme).items() if isinstance(value, str))


def _side(machines: Sequence[tuple[str, str, list[Section], Html]], links: Sequence[tuple[str, str]]) -> Html:
    choose = None
    if len(machines) > 1:
        options = [tag("option", name, value=identity) for identity, name, _, _ in machines]
        choose = tag("div", tag("label", "Machine", for_="machine"), tag("select", *options, id="machine"))
    navigation = [
        tag(
            "nav",
            *(tag("a", s.title, tag("span", s.count, class_="count"), href=f"#{s.id}") for s in sections),
            data_machine=identity,
            aria_label=f"Sections of {name}",
        )
        for identity, name, sections, _ in machines
    ]
    return tag(
        "div",
        tag("div", _LOGO, "trainstep", class_="brand"),
        choose,
        *navigation,
        tag(
            "footer",
            *(tag("a", said, href=address) for said, address in links),
            tag("noscript", "Charts need JavaScript; the tables do not."),
            tag("button", "Dark theme", type="button", class_="theme"),
        ),
        class_="side",
    )


def _main(machines: Sequence[tuple[str, str, list[Section], Html]], damaged: Sequence[str]) -> Html:
    banner = None
    if damaged:
        lines = [tag("li", line) for line in damaged]
        title = f"{len(damaged)} damaged result file{'s' if len(damaged) > 1 else ''}, skipped"
        banner = tag("div", tag("h3", title), tag("ul", *lines), class_="banner", role="alert")
    empty = None if machines else tag("p", "Nothing has been measured yet.", class_="empty")
    return tag("main", banner, empty, join(body for _, _, _, body in machines), id="main")
