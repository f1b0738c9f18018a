"""What `profile` and `precision` leave: rows as every other measurement's, which explain and are compared with nothing."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.cases.case import Case
from benchmarks.measure.record import STUDY, Row, RunWriter

# The commands, and the directories under results/local/ where their rows stay.
STUDIES = ("profile", "precision")


class Study:
    """The rows of one command, in a file of its own.

    Args:
        name: of STUDIES.
        device: "cpu" or "cuda".
        directory: of the file, made with the first row.
    """

    def __init__(self, name: str, device: str, directory: Path) -> None:
        from benchmarks.cases.registries import ROOT
        from benchmarks.measure.provenance import environment, provenance

        facts = provenance(ROOT)
        run = f"{name}-{device}-{_now().strftime('%Y%m%dT%H%M%S')}"
        self._writer = RunWriter(directory, run)
        env = environment(device) | {"world_size": 1}
        self._template = facts.template(suite=STUDY, run=run, machine="local", env=env)
        self.path = self._writer.path
        self.close = self._writer.close

    def add(
        self,
        case: Case,
        metrics: Mapping[str, dict[str, Any]] | None = None,
        *,
        status: str = "ok",
        reason: str | None = None,
    ) -> Row:
        """Store what was seen of a case, or why nothing was.

        Raises:
            ValueError: the place cannot be written.
        """
        row = replace(
            self._template,
            case=case.id,
            started_at=_now().isoformat(timespec="seconds"),
            status=status,
            reason=reason,
            metrics=dict(metrics or {}),
        )
        self._writer.add(row)
        return row


def _now() -> datetime:
    return datetime.now(UTC)
