"""asv's and pytest-benchmark's result files as rows, so that gate, page and tables see one kind of thing."""

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.cases.case import parse_id
from benchmarks.circumstances import state_of_phase
from benchmarks.measure.record import Row, check_metrics, strict_json, write_atomically

# asv keeps these among a result's parameters; every other one is part of the environment.
_ASV_MACHINE = {"machine", "arch", "os", "num_cpu", "ram"}
# What asv does not record of an environment that it did not build.
_STAMPED = (
    *("device", "torch", "triton", "asv", "asv_runner", "cpu", "cpu_count", "cpu_threads"),
    *("gpu", "driver", "cuda", "host"),
)


def read_foreign(path: Path) -> list[Row]:
    """The rows of a JSON file of asv or pytest-benchmark.

    Raises:
        ValueError: the file is damaged, or of neither tool.
    """
    try:
        text = path.read_text(encoding="utf-8")
        loose = json.loads(text)  # asv writes NaN for a skipped benchmark
        if isinstance(loose, dict) and "result_columns" in loose:
            return _asv_rows(loose, path.stem)
        strict = strict_json(text)
        if isinstance(strict, dict) and "benchmarks" in strict and "machine_info" in strict:
            return _pytest_rows(strict, path.stem)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    raise ValueError("neither asv's nor pytest-benchmark's")


def asv_case_id(benchmark: str, parameters: tuple[str, ...]) -> str | None:
    """The case id of `bench_<area>.<Phase>.sampled` with parameters (target, shape), None for others."""
    match = re.fullmatch(r"bench_(\w+)\.([A-Z]\w*)\.sampled", benchmark)
    if match is None or len(parameters) != 2:
        return None
    phase = re.sub(r"(?<!^)(?=[A-Z])", "_", match[2]).lower()
    # asv stores the repr of a parameter.
    target, shape = (p[1:-1] if re.fullmatch(r"'.*'|\".*\"", p) else p for p in parameters)
    return f"{match[1]}/{target}/{phase}/{shape}"


def _iso(milliseconds: float | None) -> str:
    return datetime.fromtimestamp((milliseconds or 0) / 1000, UTC).isoformat()


def _asv_rows(data: Mapping[str, Any], run: str) -> list[Row]:
    """One row a parameter combination. asv: null is failed, NaN is skipped (n/a)."""
    columns = data["result_columns"]
    known = data["params"]
    env = {k: v for k, v in known.items() if k not in _ASV_MACHINE and v not in (None, "")}
    env["python"] = data["python"]
    env.update({k: v for k, v in data.get("requirements", {}).items() if v})
    rows = []
    for name, values in data["results"].items():
        entry = dict(zip(columns, values, strict=False))
        combinations = list(product(*entry.get("params") or []))
        results = entry.get("result") or [None] * len(combinations)
        samples = entry.get("samples") or [None] * len(combinations)
        for parameters, result, taken in zip(combinations, results, samples, strict=True):
            case_id = asv_case_id(name, parameters)
            if case_id is None:
                continue
            try:
                parsed = parse_id(case_id)
            except ValueError:
                continue
            own = {"state": state_of_phase(parsed["phase"])}
            status, reason, seconds = "ok", None, ()  # type: str, str | None, tuple[float, ...]
            if result is not None and math.isnan(result):
                # asv says n/a for the pairs (target, shape) that no case has, too: such a pair is nobody's
                # row.
                status, reason = "skipped", "n/a in asv"
            elif result is None:
                status, reason = "error", "failed in asv, which keeps no reason"
            else:
                seconds = tuple(float(s) for s in taken or [result])
            rows.append(
                Row(
                    case=case_id,
                    version=_version(entry.get("version")),
                    suite="asv",
                    run=run,
                    machine=known["machine"],
                    commit=data["commit_hash"],
                    dirty=False,
                    source_sha256="",
                    ruler_sha256="",
                    started_at=_iso(entry.get("started_at")),
                    status=status,
                    reason=reason,
                    samples_seconds=seconds,
                    env=own | env | {"world_size": parsed["world_size"]},
                )
            )
    return rows


def stamp_asv(path: Path, env: Mapping[str, Any]) -> None:
    """Add to a result file of `asv run -E existing:PYTHON` what asv leaves out: versions, device, host.

    asv lists the requirements of environments that it built; of an existing one not even asv_runner's version is
    recorded, though it decides what a sample is. What the file says already stays.

    Args:
        path: asv's result file.
        env: `provenance.environment` of the Python that measured.

    Raises:
        ValueError: not one of asv's result files.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        known, required = data["params"], data["requirements"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result file of asv ({type(error).__name__}: {error})") from None
    missing = [name for name in _STAMPED if not known.get(name) and not required.get(name)]
    data["params"] = known | {name: env[name] for name in missing if env.get(name) is not None}
    write_atomically(path, json.dumps(data) + "\n")


def _version(text: Any) -> int:
    return int(text) if str(text).isdigit() else 1


def _pytest_rows(data: Mapping[str, Any], run: str) -> list[Row]:
    """One row a benchmark; `extra_info` may carry the fields of a Row that the tool has no place for."""
    commit, machine = data["commit_info"], data["machine_info"]
    rows = []
    for benchmark in data["benchmarks"]:
        extra = benchmark.get("extra_info") or {}
        bracketed = re.search(r"\[(.*)\]$", benchmark["name"])
        case_id = extra.get("case") or (bracketed[1] if bracketed else benchmark["name"])
        try:
            world_size = parse_id(case_id)["world_size"]
        except ValueError:
            continue  # a benchmark that is no case of ours
        stats, metrics = benchmark["stats"], extra.get("metrics", {})
        check_metrics(metrics)
        rows.append(
            Row(
                case=case_id,
                version=_version(extra.get("version", 1)),
                suite="pytest",
                run=run,
                machine=machine.get("node") or "local",
                commit=commit.get("id"),
                dirty=bool(commit.get("dirty")),
                source_sha256=extra.get("source_sha256", ""),
                ruler_sha256=extra.get("ruler_sha256", ""),
                started_at=data.get("datetime", ""),
                status="ok",
                samples_seconds=tuple(float(s) for s in stats.get("data") or [stats["median"]]),
                first_seconds=extra.get("first_seconds"),
                metrics=metrics,
                check=extra.get("check"),
                env={
                    **machine.get("trainstep", {}),  # see conftest.py
                    "pytest_benchmark": data.get("version"),
                    "world_size": world_size,
                    **extra.get("env", {}),
                },
            )
        )
    return rows
