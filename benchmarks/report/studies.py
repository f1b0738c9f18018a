"""What `profile` and `precision` saw, as sections of the page."""

from collections.abc import Sequence

from benchmarks.report import study_tables
from benchmarks.report.facts import Facts, contexts
from benchmarks.report.html import Html, join, tag
from benchmarks.report.parts import Page, Section, named

STUDY_AREAS = ("profile", "precision")
MOST_KERNELS = 8  # of a phase


def time_section(page: Page, identity: str, facts: Sequence[Facts]) -> Section | None:
    """Which kernels the profiled steps spend their time on: all steps side by side, then each with its answers."""
    chosen = [fact for fact in facts if fact.area == "profile" and fact.row.status == "ok"]
    if not chosen:
        return None
    together = page.sheets.sheet(
        named(identity, "profiles"),
        study_tables.profiles(chosen),
        title="Profiled steps",
        context=contexts(chosen),
    )
    return Section(
        id=f"{identity}--time",
        title="Where a step's time goes",
        lede="Device time of one step by kernel (on a CPU: by operator), without the gaps between kernels. Products "
        "are matrix products; softmax stands beside those of attention in one forward. Names of kernels are "
        "shortened: point at one for all of it.",
        content=join([together, *(_cell(page, identity, fact, fact is chosen[0]) for fact in chosen)]),
        count=str(len(chosen)),
    )


def _cell(page: Page, identity: str, fact: Facts, opened: bool) -> Html:
    """One profiled step, folded: the usual questions answered, and its table."""
    name = f"{fact.target} {fact.phase} {fact.parameters}"
    sheet = page.sheets.sheet(
        named(identity, f"kernels {name}"),
        study_tables.kernels(fact, MOST_KERNELS),
        title=f"By phase: {fact.target} {fact.label}",
        context=contexts([fact]),
        tips=study_tables.full_names(fact, MOST_KERNELS),
    )
    answers = [tag("li", said) for said in study_tables.answers_of(fact.row)]
    summary = tag("summary", tag("b", fact.parameters), f" · {fact.target} {fact.phase}")
    return tag("details", summary, tag("ul", *answers, class_="answers"), sheet, open=opened)


def precision_section(page: Page, identity: str, facts: Sequence[Facts]) -> Section | None:
    """What sums lose, and the dtypes that autocast chooses."""
    chosen = [fact for fact in facts if fact.area == "precision" and fact.row.status == "ok"]
    sums = page.sheets.sheet(
        named(identity, "sums"),
        study_tables.sums(chosen),
        title="1000 additions of 0.01",
        context=contexts([fact for fact in chosen if fact.target == "accumulation"]),
    )
    dtypes = page.sheets.sheet(
        named(identity, "dtypes"),
        study_tables.dtypes(chosen),
        title="Dtypes of a step under autocast",
        context=contexts([fact for fact in chosen if fact.target == "autocast"]),
    )
    if sums is None and dtypes is None:
        return None
    return Section(
        id=f"{identity}--precision",
        title="Precision",
        lede="What the accumulator's dtype does to a sum, and which dtype autocast gives each tensor: it decides by "
        "operation, and its lists differ between devices.",
        content=join([sums, dtypes]),
        count=str(len(chosen)),
    )
