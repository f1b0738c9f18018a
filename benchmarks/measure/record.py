"""One measured row, how it is written and where: the schema that everything after the measurement sees.

A run is one file of JSON lines, `results/records/<machine>/<commit>/<run>.jsonl`. Each added row rewrites the
whole file beside itself and moves it over the old one (`os.replace`): a reader, an interruption or a full
disk meets the file with the row or without it, never half of it. A run has hundreds of rows of a few
kilobytes, so the rewriting is cheap beside one measurement. Whoever adds rows holds a lock (`flock`) on the file
that is in the place, so that of two processes with one file the second is refused.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

SCHEMA = 1
STATUSES = ("ok", "oom", "error", "skipped", "red")
AGAIN = "gate"
STUDY = "study"
SUITES = ("run", "asv", "pytest", AGAIN, STUDY)
RESULTS = Path("results")
_TEXTS = ("case", "suite", "run", "machine", "source_sha256", "ruler_sha256", "started_at", "status")
LEAST_SAMPLES = 5  # of a published row
# Beyond these nothing was measured. Within them no rate, ratio or mean of two stored numbers overflows.
LARGEST = 1e30
SHORTEST_SECONDS = 1e-12  # besides 0, which a coarse clock gives


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case measured once, as stored: a line of JSON.

    Attributes:
        case: case id; `cases.case.parse_id` takes it apart.
        version: of the case. Rows of different versions never compare.
        suite: what ran it: "run", "asv", "pytest", or "gate" where an alarm was measured again beside other commits
            (`env["beside"]`): such rows answer that alarm, see `benchmarks.again`, and are no others' history; "study"
            where `profile` or `precision` explains: such rows are compared with nothing.
        run: id of the run, the file's name.
        machine: name given on the command line, or "local".
        commit: 40 hex digits, None where git does not travel (see `adopt`).
        dirty: the work tree differed from the commit in src/ or benchmarks/.
        source_sha256: of the tree src/.
        ruler_sha256: of the tree benchmarks/.
        started_at: UTC, ISO 8601.
        status: "ok", "oom" (out of memory), "error", "skipped" (cannot run here) or "red" (check failed: no
        speed). reason: one line, for every status but "ok".
        samples_seconds: every timed repetition; empty unless ok.
        first_seconds: the first call, which may compile; None unless it ran.
        metrics: name -> {"value", "unit", "better": "lower" | "higher" | None[, "samples"]}.
        check: {"error", "budget"} or None where there is nothing to check.
        env: what the result depends on: device, driver, torch, triton, python, world size, tool versions, ...
            `env["process"]` numbers the process that took the samples where a case is measured in several
            (one row each): the gate takes the minimum of each process on a CPU.
    """

    case: str
    version: int
    suite: str
    run: str
    machine: str
    commit: str | None
    dirty: bool
    source_sha256: str
    ruler_sha256: str
    started_at: str
    status: str
    reason: str | None = None
    samples_seconds: tuple[float, ...] = ()
    first_seconds: float | None = None
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    check: dict[str, float | None] | None = None
    env: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """A dictionary that strict JSON can hold, once non-finite numbers were replaced by the writer."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Any) -> "Row":
        """The row of a stored line.

        Raises:
            ValueError: a field is absent, unknown or of the wrong kind.
        """
        if not isinstance(stored, dict):
            raise ValueError("not a row")
        if stored.get("schema") != SCHEMA:
            raise ValueError(f"schema {stored.get('schema')!r}, this program reads {SCHEMA}")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(stored) - known):
            raise ValueError(f"unknown field {unknown[0]!r}")
        for name in _TEXTS:
            if not isinstance(stored.get(name), str):
                raise ValueError(f"field {name!r} is not text")
        if re.search(r"\d{19}", stored["case"]):
            raise ValueError("a number in the case id is larger than any shape's")
        if stored["status"] not in STATUSES:
            raise ValueError(f"unknown status {stored['status']!r}")
        if not isinstance(stored.get("version"), int) or not isinstance(stored.get("dirty"), bool):
            raise ValueError("version or dirty has the wrong kind")
        for name in ("commit", "reason"):
            if not isinstance(stored.get(name), str | None):
                raise ValueError(f"field {name!r} is not text")
        for name in ("metrics", "env"):
            if not isinstance(stored.get(name, {}), dict):
                raise ValueError(f"field {name!r} is not a table")
        check_metrics(stored.get("metrics", {}))
        samples = stored.get("samples_seconds", [])
        if not isinstance(samples, list) or not all(is_time(s) for s in samples):
            raise ValueError("samples_seconds are not times")
        if not (stored.get("first_seconds") is None or is_time(stored["first_seconds"])):
            raise ValueError("first_seconds is no time")
        check = stored.get("check")
        if check is not None and not (
            isinstance(check, dict)
            and all(
                v is None or _is_number(v, sys.float_info.max) for v in map(check.get, ("error", "budget"))
            )
        ):
            raise ValueError("check has no error and budget")
        return cls(**{**stored, "samples_seconds": tuple(float(s) for s in samples)})


def _is_number(value: Any, largest: float = LARGEST) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -largest <= value <= largest


def is_time(value: Any) -> bool:
    """Whether the seconds can be a clock's."""
    return _is_number(value) and (value == 0 or value >= SHORTEST_SECONDS)


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Refuse metrics that nobody could compare later.

    Raises:
        ValueError: a metric without a value, with a value or samples that are no numbers (no times, in seconds), or
            with a better side that is neither "lower", "higher" nor None.
    """
    for name, metric in metrics.items():
        if not isinstance(metric, Mapping) or "value" not in metric:
            raise ValueError(f"metric {name!r} has no value")
        samples = metric.get("samples") or []
        usable = is_time if metric.get("unit") == "s" else _is_number
        if not isinstance(samples, list) or not all(
            v is None or usable(v) for v in (metric["value"], *samples)
        ):
            raise ValueError(f"metric {name!r} has a value or samples that were not measured")
        if metric.get("better") not in ("lower", "higher", None):
            raise ValueError(
                f"metric {name!r} is better {metric['better']!r}; known: 'lower', 'higher', None"
            )


def finite_or_absent(value: Any) -> Any:
    """The same structure with every NaN and infinity replaced by None, and numbers of other libraries by Python's.

    Raises:
        TypeError: something that is neither structure, text nor number.
    """
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # numpy's scalars, tensors of one element
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite_or_absent(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_absent(v) for v in value]
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"not storable: {type(value).__name__}")


def to_line(row: Row) -> str:
    """One row as one line of strict JSON.

    What is not finite is absent and the status stays as it was. One sample that is not finite makes all of
    the row's samples absent: the clock or the case is broken, and a median over the rest would hide it; the
    gate calls an "ok" row without samples failed.
    """
    stored = finite_or_absent(row.to_json())
    if any(s is None for s in stored["samples_seconds"]):
        stored["samples_seconds"] = []
    for metric in stored["metrics"].values():
        if any(s is None for s in metric.get("samples") or ()):
            metric["samples"], metric["value"] = [], None
    return json.dumps(stored, allow_nan=False, ensure_ascii=True, separators=(",", ":")) + "\n"


def strict_json(text: str) -> Any:
    """Parse JSON as its standard has it: no NaN, no Infinity, no number that overflows to one.

    Raises:
        ValueError: the text is not strict JSON.
    """

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"{digits} is not a finite number")
        return value

    return json.loads(text, parse_constant=refuse, parse_float=number)


def file_at(path: Path) -> Path:
    """The regular file that is at `path` or would be made there, behind its symbolic links.

    Raises:
        ValueError: a directory, a device, a pipe or the like is there, which is neither read nor replaced.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ValueError(f"cannot use {path}: {error.strerror or error}") from None
    else:
        if not stat.S_ISREG(mode):
            what = "a directory; name a file" if stat.S_ISDIR(mode) else "not a regular file"
            raise ValueError(f"{path} is {what}")
    return Path(os.path.realpath(path))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Put `content` at `path` so that others see the old file or the new one, never a part.

    Raises:
        ValueError: the place cannot be written, or holds something else than a regular file.
    """
    _replace(path, content, lock=False).close()


def _replace(path: Path, content: str | bytes, *, lock: bool) -> BinaryIO:
    """`write_atomically`; returns the new file, locked since before it came to its place."""
    place, temporary = file_at(path), None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=place.parent)
        file = os.fdopen(handle, "wb")
        if lock:
            fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would keep a shared results directory from being read
        os.replace(temporary, place)
        temporary = None
        return file
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _locked(path: Path) -> BinaryIO:
    """The file at `path`, made if it is absent, locked until what is returned is closed or the process ends.

    Raises:
        ValueError: another process holds it, or the place cannot be written.
    """
    place = file_at(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = open(place, "ab")  # noqa: SIM115  # the caller closes it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if place.exists() and os.path.samestat(os.fstat(file.fileno()), place.stat()):
                return file
            file.close()  # its holder put another in the place, or took it away
    except BlockingIOError:
        raise ValueError(f"another process is writing {path}; wait for it, or name another file") from None
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None


def safe_name(text: str) -> str:
    """A file name for text from outside: letters, digits, `.`, `_`, `-`; different texts give different
    names.

    Text that is already such a name is kept; any other is cleaned and gets eight digits of its SHA-256. A
    name that ends like such digits gets them too, so that it cannot pass for another text's.
    """
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip(".-")[:80]
    if cleaned and cleaned == text and not re.search(r"-[0-9a-f]{8}$", text):
        return text
    digits = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{cleaned or 'name'}-{digits}"


def check_published(row: Row) -> None:
    """Refuse a row that is too little for a published series, whichever way it comes there.

    Rows without any times (a case that counts bytes) are complete without.

    Raises:
        ValueError: it has fewer samples than a published row needs.
    """
    timed = row.status == "ok" and (row.samples_seconds or not row.metrics)
    if timed and len(row.samples_seconds) < LEAST_SAMPLES:
        raise ValueError(
            f"{row.case} has {len(row.samples_seconds)} samples, and a published row needs {LEAST_SAMPLES}"
        )


def check_machine(name: str) -> str:
    """The name, when it can stand for a machine in paths, tables and asv.

    Raises:
        ValueError: it cannot, or it is "local", which stands for no machine.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) or name.endswith("."):
        raise ValueError(
            f"machine name {name!r} is not usable: 1 to 63 of letters, digits and '._-', first no sign"
        )
    if name == "local":
        raise ValueError("machine name 'local' is taken: it stands for runs without --machine")
    return name


def destination(machine: str | None, commit: str | None, results: Path = RESULTS) -> Path:
    """The directory a run's file goes to.

    `results/records/<machine>/<commit>/` is the published series and needs both names; without a machine rows
    go to the git-ignored `results/local/<commit>/` (`no-commit` where git does not travel).

    Raises:
        ValueError: the machine's name is unusable, or it has no commit to be filed under.
    """
    if commit is not None and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise ValueError(f"{commit!r} is not a full commit id (40 hex digits)")
    if machine is None:
        return results / "local" / (commit or "no-commit")
    check_machine(machine)
    if commit is None:
        raise ValueError(
            f"no commit known here to file {machine}'s rows under: write them with --out, adopt them later"
        )
    return results / "records" / machine / commit


class RunWriter:
    """Writes one run's rows, each whole as soon as it is added, and knows what a resumed run has already.

    The file is this writer's alone until it is closed.

    Args:
        directory: see `destination`; made if it is absent.
        run_id: any text; `safe_name` makes the file's name of it.

    Raises:
        ValueError: the run's file is there and damaged, or no regular file, or another process is writing it; it is
            left alone.
    """

    def __init__(self, directory: Path | str, run_id: str) -> None:
        self._open(Path(directory) / f"{safe_name(run_id)}.jsonl")

    @classmethod
    def to_file(cls, path: Path | str) -> "RunWriter":
        """A writer for a file named by the user (`--out`)."""
        writer = cls.__new__(cls)
        writer._open(Path(path))
        return writer

    def _open(self, path: Path) -> None:
        self.path = path
        self._file = _locked(path)
        try:
            self.rows: list[Row] = read_rows(path)
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged ({error}); move it away to measure again, or take out what is damaged to go on"
            ) from None
        self._text = "".join(to_line(row) for row in self.rows)

    def close(self) -> None:
        """Let go of the file; of a run without rows nothing stays."""
        if not self.rows:
            file_at(self.path).unlink(missing_ok=True)
        self._file.close()

    def start_over(self) -> None:
        """Forget the rows, also in the file.

        Raises:
            ValueError: the place cannot be written.
        """
        self._write("")
        self.rows = []

    def _write(self, text: str) -> None:
        file = _replace(self.path, text, lock=True)
        self._file.close()
        self._file, self._text = file, text

    def add(self, row: Row) -> None:
        """Store a row; on return it is on the disk.

        Raises:
            ValueError: the place cannot be written, or the file holds rows of other sources: resuming would
            put two programs' times into one run.
        """
        if self.rows:
            first = self.rows[0]
            mine = (row.commit, row.source_sha256, row.ruler_sha256, row.machine)
            if mine != (first.commit, first.source_sha256, first.ruler_sha256, first.machine):
                raise ValueError(f"{self.path} was measured with other sources; choose another run or file")
        self._write(self._text + to_line(row))
        self.rows.append(row)

    def done_ids(self, process: int | None = None) -> set[str]:
        """Ids of the cases that have a row, of any status; with `process`, a row taken by that process."""
        return {r.case for r in self.rows if process is None or r.env.get("process") == process}


class MemoryWriter(RunWriter):
    """Keeps rows and writes nothing: for the ranks that do not write under torchrun."""

    def __init__(self) -> None:
        self.path = Path(os.devnull)
        self.rows = []

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows.append(row)

    def close(self) -> None:
        """Nothing is held."""


def read_rows(path: Path) -> list[Row]:
    """The rows of one of our own files.

    Raises:
        ValueError: the file is damaged; says where.
    """
    try:
        text = file_at(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            rows.append(Row.from_json(strict_json(line)))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return rows


def load(paths: Iterable[Path | str]) -> tuple[list[Row], list[str]]:
    """Rows of every result file: our own, asv's (`results/asv/<machine>/*.json`) and pytest-benchmark's.

    A damaged file gives no rows and one line that names it; nothing is written.

    Args:
        paths: files, or directories searched for `*.jsonl` and `*.json`.

    Returns:
        rows in the files' order, and one problem a file that could not be read.
    """
    from benchmarks.measure.foreign import read_foreign

    rows: list[Row] = []
    problems: list[str] = []
    for path in _files(paths):
        try:
            if path.suffix == ".jsonl":
                rows += read_rows(path)
            else:  # the other tools' files are held to the same rules
                foreign = map(Row.to_json, read_foreign(file_at(path)))
                rows += [Row.from_json(r | {"samples_seconds": list(r["samples_seconds"])}) for r in foreign]
        except (ValueError, OverflowError) as error:
            problems.append(f"{path}: skipped, damaged: {error}")
    return rows, problems


def _files(paths: Iterable[Path | str]) -> Iterable[Path]:
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        for found in sorted(p for p in path.rglob("*") if p.suffix in (".jsonl", ".json")):
            # asv keeps these two beside its results; they hold no result. A leading dot: a write under way.
            if found.name not in ("machine.json", "benchmarks.json") and not found.name.startswith("."):
                yield found
