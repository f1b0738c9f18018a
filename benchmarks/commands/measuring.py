"""What every measuring command does: choose the device, measure, show progress, keep rows, print a table."""

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.cases.case import Case
from benchmarks.measure.record import (
    LEAST_SAMPLES,
    MemoryWriter,
    Row,
    RunWriter,
    check_machine,
    destination,
    file_at,
)
from benchmarks.measure.sampling import Policy

if TYPE_CHECKING:
    from benchmarks.measure.provenance import Provenance

Device = Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one.")]
Machine = Annotated[
    str | None,
    typer.Option(help="Publish the rows under results/records/NAME; without it they stay in results/local."),
]
Samples = Annotated[
    int | None, typer.Option(help="Exactly this many samples a case instead of sampling until tight.")
]
Warmup = Annotated[int | None, typer.Option(help="Untimed calls before the first sample.")]
Out = Annotated[Path | None, typer.Option(help="Write the rows to this file of JSON lines.")]

FAILED = 11


def choose_device(device: str) -> str:
    """ "cpu" or "cuda" from an option.

    Raises:
        ValueError: another word, or cuda where there is none.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    one_of(device, ("cpu", "cuda"), "device")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' asked for, but torch finds no CUDA device here")
    return device


def choose_policy(
    device: str,
    samples: int | None,
    warmup: int | None,
    *,
    what: str = "samples",
    one_of_several: bool = False,
) -> Policy:
    """Sampling from the command line's options; `what` is the option that holds `samples`.

    One of several processes, which the gate compares by their minima on a CPU, samples for a second: to start it took
    several, and a neighbour's busy spell is often longer than the 0.3 s that are enough elsewhere.

    Raises:
        ValueError: a count out of range.
    """
    options: dict[str, Any] = {"cap_seconds": 0.5, "min_samples": 10}
    if device == "cpu":
        floor = 1.0 if one_of_several else 0.3
        options = {"cap_seconds": 1.0, "min_samples": 5, "max_samples": 2000, "floor_seconds": floor}
    if samples is not None:
        if samples < 1:
            raise ValueError(f"{what} must be at least 1, got {samples}")
        options |= {"min_samples": samples, "max_samples": samples}
    if warmup is not None:
        options["warmup"] = warmup
    return Policy(**options)


def pick(word: str, known: Sequence[str], what: str) -> list[str]:
    """The named one, or all of them for "all".

    Raises:
        ValueError: unknown; the message lists the known ones.
    """
    return list(known) if word == "all" else [one_of(word, ["all", *known], what)]


def one_of(word: str, known: Sequence[str], what: str) -> str:
    """The word, if it is known.

    Raises:
        ValueError: it is not; the message lists the known ones.
    """
    if word not in known:
        raise ValueError(f"unknown {what} {word!r}; known: {', '.join(known)}")
    return word


def check_head_width(width: int) -> None:
    """Refuse what no attention takes.

    Raises:
        ValueError: the head width is out of the contract's range.
    """
    from trainstep.attention.contract import LARGEST_HEAD_WIDTH, SMALLEST_HEAD_WIDTH

    if not SMALLEST_HEAD_WIDTH <= width <= LARGEST_HEAD_WIDTH:
        raise ValueError(
            f"head width must be from {SMALLEST_HEAD_WIDTH} to {LARGEST_HEAD_WIDTH}, got {width}"
        )


def counts(text: str, what: str, least: int = 1) -> list[int]:
    """A list of counts such as "256,1024".

    Raises:
        ValueError: not whole numbers, or one below `least`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) >= least for part in parts):
        raise ValueError(
            f"{what} must be whole numbers of at least {least}, separated by commas, got {text!r}"
        )
    return [int(part) for part in parts]


@contextlib.contextmanager
def source_tree(source: Path | None) -> Iterator[Path]:
    """Measure the trainstep in this `src` directory instead of the checkout's own.

    Raises:
        ValueError: no trainstep there, or another one is imported already.
    """
    from benchmarks.cases.registries import ROOT

    chosen = (source or ROOT / "src").resolve()
    if not (chosen / "trainstep" / "__init__.py").is_file():
        raise ValueError(f"no trainstep in {str(source)!r}: the directory must hold trainstep/__init__.py")
    sys.path.insert(0, str(chosen))
    # Ranks and other child processes find the same tree.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(chosen), *filter(None, [os.environ.get("PYTHONPATH")])])
    import trainstep

    if Path(trainstep.__file__).resolve().parents[1] != chosen:
        raise ValueError(f"trainstep was already imported from elsewhere than {str(source)!r}")
    yield chosen


def writable(directory: Path) -> None:
    """Refuse a place that cannot be written before anything is measured.

    Raises:
        ValueError: it cannot.
    """
    parent = directory
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):  # asking for permission says yes to root everywhere
            pass
    except OSError as error:
        raise ValueError(f"cannot write to {directory}: {error.strerror or error}") from None


def run_id(cases: Sequence[Case], policy: Policy, device: str, provenance: Any) -> str:
    """Name of a run that a repetition of the same command finds again: device and a hash of what is measured how."""
    text = repr(
        ([case.id for case in cases], policy, device, provenance.source_sha256, provenance.ruler_sha256)
    )
    return f"{device}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def checked(
    policy: Policy,
    *,
    machine: str | None = None,
    out: Path | None = None,
    source: Path | None = None,
    commit: str | None = None,
    process: int | None = None,
) -> Iterator[tuple["Provenance", Path]]:
    """Refuse bad options before anything is measured or written; inside, the source that they name is the one imported.

    Yields:
        where rows come from, and the directory they go to.

    Raises:
        ValueError: an option is wrong, or its place cannot be written.
    """
    from benchmarks.cases.registries import ROOT
    from benchmarks.measure.provenance import provenance

    if machine is not None:
        check_machine(machine)
        if policy.timed and policy.min_samples < LEAST_SAMPLES:
            raise ValueError(
                f"a published row needs at least {LEAST_SAMPLES} samples, got {policy.min_samples}"
            )
    if process is not None and process < 0:
        raise ValueError(f"process must not be negative, got {process}")
    place = None if out is None else file_at(out)
    with source_tree(source) as tree:
        facts = provenance(ROOT, source=tree if source else None, commit=commit)
        if machine is not None and facts.dirty:
            raise ValueError(
                "the work tree differs from its commit; commit first, a dirty tree is no history"
            )
        directory = place.parent if place else destination(machine, facts.commit, ROOT / "results")
        writable(directory)
        yield facts, directory


def _open(directory: Path, name: str, out: Path | None, fresh: bool) -> RunWriter:
    """The file of a run, with the rows it has already.

    Raises:
        ValueError: it is damaged, or another run's, or another process is writing it.
    """
    writer = RunWriter.to_file(out) if out is not None else RunWriter(directory, f"{name}.partial")
    if fresh and writer.rows:  # only rows are thrown away, never another file
        writer.start_over()
    if any(row.run != name for row in writer.rows):
        raise ValueError(
            f"{writer.path} holds another run (other code, cases or options); choose another file or --fresh"
        )
    return writer


def measure_cases(
    cases: Sequence[Case],
    *,
    device: str,
    policy: Policy,
    machine: str | None = None,
    out: Path | None = None,
    source: Path | None = None,
    commit: str | None = None,
    process: int | None = None,
    fresh: bool = False,
) -> tuple[list[Row], Path]:
    """Measure, with progress on stderr, and keep every row as it comes.

    An interrupted run is taken up where it stopped: its file carries `.partial` in its name until it is complete.

    Returns:
        all rows of the run, and the file that holds them.

    Raises:
        ValueError: nothing to measure, or a place that cannot be written, before anything is measured.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from benchmarks.measure.provenance import environment
    from benchmarks.measure.ranks import agreed, is_first
    from benchmarks.runner import run_cases

    if not cases:
        raise ValueError("no case matches")
    with checked(policy, machine=machine, out=out, source=source, commit=commit, process=process) as (
        facts,
        directory,
    ):
        name = run_id(cases, policy, device, facts)
        writer: RunWriter = MemoryWriter()
        refusal: str | None = None
        if is_first():
            try:
                writer = _open(directory, name, out, fresh)
            except ValueError as error:
                refusal = str(error)
        else:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the first rank prints for all
        if refusal := agreed(refusal, device):
            raise ValueError(refusal)
        env = environment(device) | {"warmup": policy.warmup, "inner": policy.inner}
        template = facts.template(suite="run", run=name, machine=machine or "local", env=env)
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not (sys.stderr.isatty() and is_first()),  # a log would get a blank line
        )
        with contextlib.closing(writer):
            try:
                with bar:
                    done = len(writer.done_ids(process) & {case.id for case in cases})
                    if done == len(cases) and is_first():
                        print("every row was there already; nothing was measured", file=sys.stderr)
                    task = bar.add_task("measuring", total=len(cases), completed=done)
                    for row in run_cases(
                        cases, device=device, policy=policy, template=template, writer=writer, process=process
                    ):
                        bar.update(task, advance=1, description=row.case.rsplit("/", 1)[0])
            except KeyboardInterrupt:
                if writer.rows and is_first():
                    print(f"{len(writer.rows)} rows are kept in {writer.path}", file=sys.stderr)
                raise
            path = writer.path
            if out is None and is_first():
                path = path.replace(directory / f"{name}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S')}.jsonl")
            return list(writer.rows), path


def status_of(rows: Sequence[Row]) -> int:
    """Exit status of a measuring command: out of memory and skipped are answers, an error or a red check is not."""
    return FAILED if any(row.status in ("error", "red") for row in rows) else 0
