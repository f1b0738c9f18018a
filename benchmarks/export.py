"""Rows written as asv's results and as pytest-benchmark's JSON, so that both tools' own commands show them.

Tables (Markdown, LaTeX, Typst, CSV) are made in `report.formats`.
"""

import hashlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.cases.case import Case
from benchmarks.circumstances import circumstances
from benchmarks.measure.provenance import git
from benchmarks.measure.record import (
    AGAIN,
    STUDY,
    Row,
    finite_or_absent,
    safe_name,
    strict_json,
    write_atomically,
)

AsvName = Callable[[Case], tuple[str, tuple[str, str]]]
_MARK = "records"  # first word of the environment's name in files that `to_asv` wrote


def to_asv(
    rows: Iterable[Row], directory: Path, *, cases: Sequence[Case], asv_name: AsvName, root: Path
) -> tuple[list[Path], list[Row]]:
    """Write rows as asv results: `<directory>/<machine>/<commit>-<environment>.json` with asv's own writer.

    `machine.json` is made where there is none, `benchmarks.json` gets the benchmarks of `cases` beside those
    it has. Samples of a case at a commit are pooled over processes and runs made under the same
    circumstances. asv's null is a failed row (out of memory, error, red check), its NaN one that was skipped
    or not measured. Exporting again replaces the same files.

    Args:
        rows: of any machines and commits.
        directory: asv's results_dir.
        cases: those of the live asv suite, in its order: parameters are stored by position.
        asv_name: case -> (benchmark, (target, shape)), see `suite.asv_name`.
        root: the repository, for the commits' dates.

    Returns:
        the result files, and the rows that asv has no place for: measured by another suite, no commit or a
        dirty one, no such case in the live suite, or another version of it.

    Raises:
        ValueError: git does not know a commit, a name is unusable, or benchmarks.json is damaged.
    """
    from asv.results import Results

    benchmarks = asv_benchmarks(cases, asv_name)
    places = {case.id: (case.version, *asv_name(case)) for case in cases}
    left: list[Row] = []
    files: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        version = places[row.case][0] if row.case in places else None
        if row.commit is None or row.dirty or row.version != version or row.suite != "run":
            left.append(row)
        else:
            files[row.machine, row.commit, _environment_name(row)].append(row)
    written = []
    if files:
        _merge_benchmarks(directory / "benchmarks.json", benchmarks)
    for (machine, commit, name), members in sorted(files.items()):
        facts = _machine_facts(machine, members[0])
        if not (directory / machine / "machine.json").exists():
            text = json.dumps({**facts, "version": 1}, indent=4, sort_keys=True)
            write_atomically(directory / machine / "machine.json", text + "\n")
        env = members[0].env
        requirements = {k: str(env[k]) for k in ("torch", "triton") if env.get(k)}
        python = str(env.get("python") or "")
        hardware = {k: str(env[k]) for k in ("gpu", "driver", "cuda") if env.get(k)}
        results = Results(
            {**facts, "python": python, **requirements, **hardware},
            requirements,
            commit,
            int(git(root, "show", "--no-patch", "--format=%ct", commit)) * 1000,
            python,
            name,
            {},
        )
        by_case = defaultdict(list)
        for row in members:
            by_case[places[row.case][1:]].append(row)
        for benchmark in sorted({benchmark for benchmark, _ in by_case}):
            shape = benchmarks[benchmark]
            started = min(
                _started(row) for (b, _), found in by_case.items() if b == benchmark for row in found
            )
            results.add_result(shape, _asv_result(shape, by_case), started_at=started, record_samples=True)
        results.save(str(directory))
        written.append(directory / machine / f"{commit[:8]}-{name}.json")
    return written, left


def exported(row: Row) -> bool:
    """Whether a row was read back from a file that `to_asv` wrote: its record is the original."""
    return row.suite == "asv" and row.run.partition("-")[2].startswith(f"{_MARK}-")


def asv_benchmarks(cases: Sequence[Case], asv_name: AsvName) -> dict[str, dict[str, Any]]:
    """The entries of `benchmarks.json`: one a benchmark, parameters in the cases' order as asv stores
    them."""
    members: dict[str, list[tuple[Case, tuple[str, str]]]] = defaultdict(list)
    for case in cases:
        name, parameters = asv_name(case)
        members[name].append((case, parameters))
    return {
        name: {
            "code": "",
            "name": name,
            "param_names": ["target", "shape"],
            "params": [list(dict.fromkeys(repr(parameters[i]) for _, parameters in found)) for i in (0, 1)],
            "timeout": 600,
            "type": "time",
            "unit": "seconds",
            "version": str(max(case.version for case, _ in found)),
        }
        for name, found in members.items()
    }


def _merge_benchmarks(path: Path, benchmarks: dict[str, dict[str, Any]]) -> None:
    """Put entries into asv's list, keeping the other ones and what asv knows more of ours (the code)."""
    known: dict[str, Any] = {"version": 2}
    if path.exists():
        try:
            known = strict_json(path.read_text(encoding="utf-8"))
            assert isinstance(known, dict)
        except (OSError, ValueError, AssertionError):
            raise ValueError(f"{path} is damaged; move it away, asv makes it anew") from None
    for name, entry in benchmarks.items():
        known[name] = {
            **entry,
            **{k: v for k, v in known.get(name, {}).items() if k not in ("params", "version")},
        }
    write_atomically(path, json.dumps(known, indent=4, sort_keys=True, allow_nan=False) + "\n")


def _environment_name(row: Row) -> str:
    """Names the file and asv's environment: rows of different circumstances never share one."""
    env = row.env
    parts = [_MARK, f"py{env.get('python') or ''}"]
    parts += [f"{name}{env[name]}" for name in ("torch", "triton") if env.get(name)]
    parts += [str(env[name]) for name in ("gpu", "driver") if env.get(name)]
    of_the_case = ("machine", "version", "world_size", "state")
    series = {k: v for k, v in circumstances(row).items() if k not in of_the_case}
    digits = hashlib.sha256(json.dumps(series, sort_keys=True, default=str).encode()).hexdigest()[:6]
    return safe_name("-".join([*parts, digits]))


def _machine_facts(machine: str, row: Row) -> dict[str, str]:
    env = row.env
    return {
        "machine": machine,
        "os": str(env.get("os") or ""),
        "arch": str(env.get("arch") or ""),
        "cpu": str(env.get("cpu") or ""),
        "num_cpu": str(env.get("cpu_count") or ""),
        "ram": "",
    }


def _started(row: Row) -> datetime:
    try:
        found = datetime.fromisoformat(row.started_at)
    except ValueError:
        return datetime(1970, 1, 1, tzinfo=UTC)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _asv_result(benchmark: dict[str, Any], by_case: dict[Any, list[Row]]) -> Any:
    """All parameter combinations of a benchmark as asv's runner would hand them over."""
    from asv.runner import BenchmarkResult

    names = {(b, tuple(map(repr, parameters))): found for (b, parameters), found in by_case.items()}
    result: list[float | None] = []
    samples: list[list[float] | None] = []
    number: list[int | None] = []
    for parameters in product(*benchmark["params"]):
        rows = names.get((benchmark["name"], parameters), [])
        taken = [seconds for row in rows if row.status == "ok" for seconds in row.samples_seconds]
        if taken:
            result.append(statistics.median(taken))
            samples.append(taken)
            # Of one sample asv would make an interval without end, which its own site cannot read.
            number.append(1 if len(taken) > 1 else None)
        else:
            skipped = all(row.status == "skipped" for row in rows)
            result.append(math.nan if skipped else None)
            samples.append(None)
            number.append(None)
    return BenchmarkResult(result=result, samples=samples, number=number, errcode=0, stderr="", profile=None)


def to_pytest_benchmark(rows: Iterable[Row], path: Path) -> list[Row]:
    """Write rows of one machine and commit as a file that pytest-benchmark compares and loads.

    pytest-benchmark knows no failed benchmark: rows without times are listed under `not_measured`, which it
    ignores. One sample has no standard deviation, a time of zero no rate: both are null. What the gate measured
    again and studies are left out.

    Returns:
        the rows without times.

    Raises:
        ValueError: no rows, rows of several machines or commits, or a place that cannot be written.
    """
    rows = [row for row in rows if row.suite not in (AGAIN, STUDY)]
    origins = {(row.machine, row.commit, row.dirty) for row in rows}
    if len(origins) != 1:
        raise ValueError(f"one machine and commit make a file, got {len(origins)}")
    pooled: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.status == "ok" and row.samples_seconds:
            pooled[row.case].append(row)
    absent = [row for row in rows if row.case not in pooled]
    first = rows[0]
    data = {
        "machine_info": {"node": first.machine, "trainstep": first.env},
        "commit_info": {
            "id": first.commit,
            "dirty": first.dirty,
            "time": first.started_at,
            "project": "trainstep",
        },
        "benchmarks": [_pytest_entry(found) for found in pooled.values()],
        "not_measured": [{"case": row.case, "status": row.status, "reason": row.reason} for row in absent],
        "datetime": first.started_at,
        "version": first.env.get("pytest_benchmark"),
    }
    write_atomically(path, json.dumps(finite_or_absent(data), indent=4, allow_nan=False) + "\n")
    return absent


def _pytest_entry(rows: Sequence[Row]) -> dict[str, Any]:
    first = rows[0]
    samples = [seconds for row in rows for seconds in row.samples_seconds]
    area = first.case.split("/")[0]
    name = f"test_case[{first.case}]"
    return {
        "group": None,
        "name": name,
        "fullname": f"benchmarks/pytests/test_{area}.py::{name}",
        "params": {"case": first.case},
        "param": first.case,
        "extra_info": {
            "case": first.case,
            "version": first.version,
            "source_sha256": first.source_sha256,
            "ruler_sha256": first.ruler_sha256,
            "first_seconds": first.first_seconds,
            "metrics": first.metrics,
            "check": first.check,
            "env": first.env,
        },
        "options": {"timer": "device_clock", "min_rounds": len(samples)},
        "stats": _pytest_stats(samples),
    }


def _pytest_stats(samples: Sequence[float]) -> dict[str, Any]:
    """The statistics pytest-benchmark stores, over all samples."""
    ordered = sorted(samples)
    mean, middle = statistics.fmean(ordered), statistics.median(ordered)
    spread = statistics.stdev(ordered) if len(ordered) > 1 else None
    low, _, high = (
        statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else [middle] * 3
    )
    fences = low - 1.5 * (high - low), high + 1.5 * (high - low)
    inside = [value for value in ordered if fences[0] <= value <= fences[1]]
    far = sum(abs(value - mean) > spread for value in ordered) if spread is not None else 0
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": spread,
        "rounds": len(ordered),
        "median": middle,
        "iqr": high - low,
        "q1": low,
        "q3": high,
        "iqr_outliers": len(ordered) - len(inside),
        "stddev_outliers": far,
        "outliers": f"{far};{len(ordered) - len(inside)}",
        "ld15iqr": inside[0],
        "hd15iqr": inside[-1],
        "ops": 1 / mean if mean else None,
        "total": math.fsum(ordered),
        "data": list(samples),
        "iterations": 1,
    }
