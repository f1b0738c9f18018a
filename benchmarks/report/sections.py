"""The parts of the page for one machine: headline, areas with charts and tables, history, failures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure.record import STATUSES, Row
from benchmarks.report import memory_charts, memory_tables, tables
from benchmarks.report.areas import AREAS, area_section
from benchmarks.report.cards import card, headline_groups
from benchmarks.report.chart import file_name
from benchmarks.report.facts import Facts, context_of, contexts, latest
from benchmarks.report.history_section import findings_banner, history_section
from benchmarks.report.html import Html, join, tag
from benchmarks.report.parts import Page, Section, named, renamed
from benchmarks.report.sheets import status_badge
from benchmarks.report.studies import STUDY_AREAS, precision_section, time_section


def machine_sections(
    page: Page, rows: Sequence[Row], findings: Sequence[Mapping[str, Any]]
) -> tuple[str, list[Section], Html]:
    """Everything about one machine: its id on the page, its sections, and its markup."""
    machine = rows[0].machine
    slug = file_name(machine, page.machines)
    page.machines.append(slug)
    identity = f"machine--{slug}"  # two hyphens in a row: no table and no chart is named so
    facts = latest(rows)
    made = [
        _headline(page, identity, facts),
        *(area_section(page, identity, name, facts) for name in AREAS),
        _others(page, identity, facts),
        _memory(page, identity, facts),
        time_section(page, identity, facts),
        precision_section(page, identity, facts),
        history_section(page, identity, rows, findings),
        _statuses(page, identity, facts),
    ]
    sections = [section for section in made if section is not None]
    body = tag(
        "div",
        _hero(machine, facts),
        findings_banner(page, identity, findings),
        *(s.html for s in sections),
        id=identity,
        class_="machine",
    )
    return identity, sections, body


def _hero(machine: str, facts: Sequence[Facts]) -> Html:
    newest = max((fact.row for fact in facts), key=lambda row: (row.suite != "asv", row.started_at))
    chips = [
        tag("span", f"{key} ", tag("b", value), class_="chip") for key, value in context_of(newest).items()
    ]
    counts = Counter(fact.row.status for fact in facts)
    badges = [tag("span", status_badge(s), f" {counts[s]}", class_="chip") for s in STATUSES if counts[s]]
    return tag(
        "div",
        tag("div", "unpublished runs" if machine == "local" else "machine", class_="eyebrow"),
        tag("h1", machine),
        tag("div", *chips[1:], class_="chips"),
        tag("div", *badges, class_="chips", aria_label="rows by status"),
        class_="hero",
    )


def _headline(page: Page, identity: str, facts: Sequence[Facts]) -> Section | None:
    groups = headline_groups(facts, page.is_peer)
    frame = tables.headline(facts, page.is_peer)
    sheet = page.sheets.sheet(
        named(identity, "headline"),
        frame,
        title="Every case beside the best peer of its run",
        context=contexts(facts),
    )
    pairs = page.sheets.sheet(
        named(identity, "peers"),
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


def _others(page: Page, identity: str, facts: Sequence[Facts]) -> Section | None:
    shown = {*STUDY_AREAS, *(name for area in AREAS.values() for name in area.names)}
    chosen = [fact for fact in facts if fact.area not in shown]
    if not chosen:
        return None
    sheet = page.sheets.sheet(
        named(identity, "others"), tables.every_row(chosen), title="Other cases", context=contexts(chosen)
    )
    return Section(
        id=f"{identity}--others", title="Other cases", lede="", content=join([sheet]), count=str(len(chosen))
    )


def _memory(page: Page, identity: str, facts: Sequence[Facts]) -> Section | None:
    figures = [page.figure(renamed(chart, identity, page)) for chart in memory_charts.memory_charts(facts)]
    if not any(figures):
        return None
    sheet = page.sheets.sheet(
        named(identity, "allocations"), memory_tables.allocations(facts), title="Largest allocations"
    )
    return Section(
        id=f"{identity}--memory",
        title="Memory over time",
        lede="Active memory while a step runs, with its phases, and what was allocated in the largest pieces.",
        content=join([tag("div", *figures, class_="figures"), sheet]),
        count=str(len(figures)),
    )


def _statuses(page: Page, identity: str, facts: Sequence[Facts]) -> Section | None:
    sheet = page.sheets.sheet(
        named(identity, "statuses"),
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
