"""The headline: the best of our own beside the best peer, at the largest configuration of each family."""

from collections import defaultdict
from collections.abc import Sequence

from benchmarks.report.facts import Facts, contexts
from benchmarks.report.formats import number
from benchmarks.report.html import Html, tag
from benchmarks.report.tables import IsPeer, flags

MOST_CARDS, MOST_BARS = 12, 7
_WORDS = {"ahead": "ahead of", "behind": "behind", "level": "within the spread of"}


def _work(fact: Facts) -> float:
    """How large a configuration is, for choosing the one that a card shows."""
    return max(fact.metric("flops") or 0.0, float(fact.shape.get("bytes") or 0), fact.metric("tokens") or 0.0)


def headline_groups(facts: Sequence[Facts], is_peer: IsPeer) -> list[list[Facts]]:
    """For each area, phase and dtype, one run's rows at the largest configuration where ours and a peer have a time.

    Rows are fastest first. Oversubscribed rows never make a headline, nor does a run with a row above the peak.
    """
    by_run: dict[tuple[object, ...], list[Facts]] = defaultdict(list)
    for fact in facts:
        if fact.seconds and not fact.oversubscribed:
            by_run[(fact.row.machine, fact.row.run, fact.row.commit, *fact.configuration)].append(fact)
    best: dict[tuple[str, str, str], tuple[tuple[float, int], list[Facts]]] = {}
    for group in by_run.values():
        kinds = {is_peer(fact.area, fact.target) for fact in group}
        if kinds != {True, False} or any(fact.above_peak for fact in group):
            continue
        size = (max(_work(fact) for fact in group), len(group))
        key = (group[0].area, group[0].phase, group[0].dtype)
        if key not in best or size > best[key][0]:
            best[key] = (size, sorted(group, key=lambda fact: fact.seconds or 0.0))
    return [group for _, group in best.values()][:MOST_CARDS]


def _side(ratio: float, facts: Sequence[Facts]) -> str:
    """Whether a ratio says ahead or behind, or "level": a difference below the spread of either time is noise."""
    spread = max((fact.time.spread or 0.0 for fact in facts if fact.time), default=0.0)
    if abs(ratio - 1) <= spread:
        return "level"
    return "ahead" if ratio > 1 else "behind"


def card(group: Sequence[Facts], is_peer: IsPeer) -> Html:
    """One comparison: the ratio large, every implementation's time as a bar, and where it was measured."""
    ours = next(fact for fact in group if not is_peer(fact.area, fact.target))
    peer = next(fact for fact in group if is_peer(fact.area, fact.target))
    assert ours.seconds and peer.seconds
    ratio = peer.seconds / ours.seconds
    side = _side(ratio, [ours, peer])
    said = f"{ours.target} is {_WORDS[side]} {peer.target}, the fastest peer"
    fastest = group[0].seconds or 0.0
    shown = [fact for fact in group[:MOST_BARS] if fact.seconds]
    # One very slow row would make the others' bars equal: bars end at five times the fastest.
    longest = min(max(fact.seconds or 0.0 for fact in shown), 5 * fastest)
    bars: list[Html] = []
    for fact in shown:
        assert fact.seconds is not None
        own = not is_peer(fact.area, fact.target)
        width = f"width:{100 * min(1.0, fact.seconds / longest):.1f}%"
        kind = "bar own" if own else "bar"
        bars += [
            tag("span", fact.target, class_="name", title=f"{fact.target} ({'ours' if own else 'peer'})"),
            tag("span", class_=kind + (" cut" if fact.seconds > longest else ""), style=width),
            tag("span", f"{number(fact.seconds * 1e3)} ms", class_="value"),
        ]
    return tag(
        "article",
        tag("div", f"{ours.area} · {ours.phase} · {ours.dtype}".replace("_", " "), class_="eyebrow"),
        tag(
            "div",
            f"{ratio:.2f}×",
            tag("small", "as fast as the best peer"),
            class_=f"ratio {side}",
        ),
        tag("div", said),
        tag("div", *bars, class_="bars"),
        tag("div", f"Note: {notes}", class_="behind") if (notes := flags(ours)) else None,
        tag("div", tag("div", ours.parameters, class_="mono"), contexts([ours])[0], class_="where"),
        class_="card",
    )
