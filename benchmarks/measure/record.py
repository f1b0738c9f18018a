"""One measured row: the schema that everything after the measurement sees."""

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1
STATUSES = ("ok", "oom", "error", "skipped", "red")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case measured once, as stored: a line of JSON.

    Attributes:
        case: case id; `cases.case.parse_id` takes it apart.
        version: of the case. Rows of different versions never compare.
        suite: what ran it: "run", "asv" or "pytest".
        run: id of the run, the file's name.
        machine: name given on the command line, or "local".
        commit: 40 hex digits, None where git does not travel (see `adopt`).
        dirty: the work tree differed from the commit in src/ or benchmarks/.
        source_sha256: of the tree src/.
        ruler_sha256: of the tree benchmarks/.
        started_at: UTC, ISO 8601.
        status: "ok", "oom" (out of memory), "error", "skipped" (cannot run here) or "red" (check failed: no speed).
        reason: one line, for every status but "ok".
        samples_seconds: every timed repetition; empty unless ok.
        first_seconds: the first call, which may compile; None unless it ran.
        metrics: name -> {"value", "unit", "better": "lower" | "higher" | None[, "samples"]}.
        check: {"error", "budget"} or None where there is nothing to check.
        env: what the result depends on: device, driver, torch, triton, python, world size, tool versions, ...
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
