"""`report`: tables, charts and history of everything measured, as one page that opens offline."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands.studies import STUDIES
from benchmarks.measure.record import Row

if TYPE_CHECKING:
    from benchmarks.report.page import Made
    from benchmarks.report.trends import Commit


def report(
    machine: Annotated[
        str | None, typer.Option(help='Only this machine; "local" for unpublished runs.')
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the page; results/html by default.")] = None,
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Also write every table as md, tex, typ or csv, every figure as png or svg, or the records of named"
            " machines as asv's results (results/asv, which `asv publish` shows).",
        ),
    ] = None,
) -> int:
    """Write the page; with a format, its tables or its figures as files beside it, or records as asv's results."""
    from benchmarks.cases.registries import ROOT

    directory = out if out is not None else ROOT / "results" / "html"
    print(make_report(ROOT, directory, machine=machine, file_format=file_format))
    return 0


def make_report(
    root: Path, directory: Path, *, machine: str | None = None, file_format: str | None = None
) -> Path:
    """Write the page of a checkout's results; returns its path. Damaged files are named on it and on stderr.

    Raises:
        ValueError: no such machine or format, or a place that cannot be written; nothing is written then.
    """
    from benchmarks.commands.measuring import writable
    from benchmarks.commands.printing import is_peer
    from benchmarks.measure.record import file_at, write_atomically
    from benchmarks.report.formats import FORMATS
    from benchmarks.report.page import build_page
    from benchmarks.report.plots import IMAGE_FORMATS
    from benchmarks.report.trends import regressions, trends

    known_formats = (*FORMATS, *IMAGE_FORMATS, "asv")
    if file_format is not None and file_format not in known_formats:
        raise ValueError(f"unknown format {file_format!r}; known: {', '.join(known_formats)}")
    index = directory / "index.html"
    writable(directory)
    if file_format is not None:
        writable(root / "results" / "asv" if file_format == "asv" else _folder(directory, file_format))
    file_at(index)
    rows, damaged = collect(root / "results")
    if machine is not None:
        known = sorted({row.machine for row in rows})
        rows = [row for row in rows if row.machine == machine]
        if not rows:
            raise ValueError(f"no results of machine {machine!r}; there are: {', '.join(known) or 'none'}")
    damaged = [line.replace(f"{root}{os.sep}", "") for line in damaged]
    for line in damaged:
        print(f"warning: {line}", file=sys.stderr)
    commits = first_parents(root)
    if file_format == "asv" and not commits:
        raise ValueError("asv's results are of commits, and git knows none here")
    made = build_page(
        rows,
        is_peer=is_peer,
        commits=commits,
        findings=regressions(trends(rows, commits), commits),
        damaged=damaged,
        links=_asv_site(directory),
    )
    write_atomically(index, made.html)
    if file_format == "asv":
        write_asv(rows, root)
    elif file_format is not None:
        write_files(made, _folder(directory, file_format), file_format)
    return index


def write_asv(rows: Sequence[Row], root: Path) -> None:
    """Records of named machines as results of asv, one file a commit and environment.

    Of all tiers: what `asv run` itself measures is the smaller ones.

    Raises:
        ValueError: git does not know a commit, or asv's list of benchmarks is damaged.
    """
    from benchmarks.cases import every_case
    from benchmarks.export import to_asv
    from benchmarks.suite import asv_name

    published = [row for row in rows if row.machine != "local" and row.suite == "run"]
    _, left = to_asv(
        published, root / "results" / "asv", cases=list(every_case()), asv_name=asv_name, root=root
    )
    if left:
        print(
            f"{len(left)} of {len(published)} rows are not among asv's results: of a dirty tree, or of a case that is gone"
            f" or changed, the first {left[0].case}",
            file=sys.stderr,
        )


def _asv_site(directory: Path) -> list[tuple[str, str]]:
    """A link to what `asv publish` left beside the page, which asks a network for its scripts: made to need none."""
    from benchmarks.report.asv_site import make_offline

    site = directory / "asv"
    if (site / "index.json").is_file():
        try:
            make_offline(site)
        except ValueError as error:
            print(f"warning: {error}", file=sys.stderr)
    return [("asv site", "asv/index.html")] if (site / "index.html").is_file() else []


def collect(results: Path) -> tuple[list[Row], list[str]]:
    """Every row under a results directory, under today's case ids, and a line for each damaged file."""
    from benchmarks.cases import every_case
    from benchmarks.export import exported
    from benchmarks.measure.record import load

    places = [results / name for name in ("records", "asv", "pytest-benchmark")]
    if (results / "local").is_dir():
        # Traces, pictures and configurations lie there too.
        places += sorted(path for path in (results / "local").iterdir() if _holds_results(path.name))
        places += sorted(path for name in STUDIES for path in (results / "local" / name).glob("*.jsonl"))
    today = {old: case.id for case in every_case() for old in case.was}
    rows, damaged = load(path for path in places if path.is_dir() or path.suffix in (".json", ".jsonl"))
    return [replace(row, case=today.get(row.case, row.case)) for row in rows if not exported(row)], damaged


def _holds_results(name: str) -> bool:
    return name in ("asv", "pytest-benchmark", "no-commit") or re.fullmatch(r"[0-9a-f]{40}", name) is not None


def first_parents(root: Path) -> list["Commit"]:
    """The first-parent history with subjects, oldest first; empty where there is no git history."""
    from benchmarks.measure.provenance import git
    from benchmarks.report.trends import Commit

    try:
        log = git(root, "log", "--first-parent", "--format=%H %s", "HEAD").decode("utf-8", "replace")
    except ValueError:
        return []
    parts = (line.partition(" ") for line in log.split("\n") if line)
    return [Commit(sha=sha, subject=subject) for sha, _, subject in parts][::-1]


def _folder(directory: Path, file_format: str) -> Path:
    from benchmarks.report.plots import IMAGE_FORMATS

    return directory / ("figures" if file_format in IMAGE_FORMATS else "tables")


def write_files(made: "Made", folder: Path, file_format: str) -> None:
    """Every table, or with a format of pictures every figure, in one format.

    Raises:
        ValueError: a place cannot be written.
    """
    from rich.console import Console
    from rich.progress import track

    from benchmarks.measure.record import write_atomically
    from benchmarks.report.plots import IMAGE_FORMATS, save_all

    if file_format not in IMAGE_FORMATS:
        for name, texts in made.tables.items():
            write_atomically(folder / f"{name}.{file_format}", texts[file_format])
        return
    pictures = track(
        save_all(made.figures, folder, file_format),
        "figures",
        total=len(made.figures),
        console=Console(stderr=True),
        transient=True,
    )
    for _ in pictures:
        pass
