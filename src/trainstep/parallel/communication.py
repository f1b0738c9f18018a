"""When collectives ran and how long the computation waited for them.

A wrapper that is given a `CommunicationLog` writes into it; without one nothing is recorded and nothing is
paid. Times are host times on a CPU (a collective ends when its future completes) and event times on CUDA.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class CommunicationTimes:
    """What one rank's log says.

    Attributes:
        spans: start and end of each collective, in seconds since the first record, in order of launch.
        waits: start and end of each stretch in which the computation stood still for communication.
        total_seconds: length of the union of the spans.
        exposed_seconds: length of the union of the waits; None where they are out of sight.
    """

    spans: tuple[Span, ...]
    waits: tuple[Span, ...]
    total_seconds: float
    exposed_seconds: float | None

    @property
    def hidden_share(self) -> float | None:
        """Share of the communication that ran beside computation, 0..1; None where that is unknown."""
        if self.total_seconds <= 0 or self.exposed_seconds is None:
            return None
        return min(1.0, max(0.0, 1.0 - self.exposed_seconds / self.total_seconds))


def union_seconds(spans: list[Span]) -> float:
    """Length of the union of intervals."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


class CommunicationLog:
    """Records collectives and waits of one rank; `reset` before a step, `read` after it.

    Args:
        device: where the computation runs.

    Attributes:
        waits_are_known: False when what is recorded waits where the log cannot see it.
    """

    waits_are_known = True

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._side = torch.cuda.Stream(device) if self._cuda else None
        self.reset()

    def reset(self) -> None:
        """Forget everything recorded."""
        self._spans: list[list[Any]] = []
        self._waits: list[tuple[Any, Any]] = []
        self._futures: list[Any] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def track(self, launch: Callable[[], dist.Work]) -> dist.Work:
        """Launch an asynchronous collective and note when it starts and ends."""
        span = [self._now(), None]
        self._spans.append(span)
        work = launch()
        if self._side is not None:
            with torch.cuda.stream(self._side):
                work.wait()  # the side stream waits, not the host and not the computation
                span[1] = self._now()
        else:

            def note_end(_: Any) -> None:
                span[1] = time.perf_counter()

            self._futures.append(work.get_future().then(note_end))
        return work

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note a stretch in which the computation waits for collectives."""
        start = self._now()
        yield
        self._waits.append((start, self._now()))

    def wait_from_last_launch(self) -> None:
        """Count the time from the last launch to the last end as waiting.

        For wrappers that wait out of sight: the last collective starts when the last gradient is there.
        """
        for future in self._futures:
            future.wait()
        if self._spans:
            self._waits.append((self._spans[-1][0], self._spans[-1][1]))

    def read(self) -> CommunicationTimes:
        """Everything since the last reset; waits until the recorded collectives are done."""
        for future in self._futures:
            future.wait()
        if self._cuda:
            torch.cuda.synchronize()
            marks = [mark for span in (*self._spans, *self._waits) for mark in span]
            base: Any = marks[0] if marks else None

            def seconds(mark: Any) -> float:
                return 0.0 if mark is base else base.elapsed_time(mark) * 1e-3
        else:
            base = min((span[0] for span in (*self._spans, *self._waits)), default=0.0)

            def seconds(mark: Any) -> float:
                return mark - base

        spans = [(seconds(start), seconds(end)) for start, end in self._spans]
        waits = [(seconds(start), seconds(end)) for start, end in self._waits]
        return CommunicationTimes(
            spans=tuple(spans),
            waits=tuple(waits),
            total_seconds=union_seconds(spans),
            exposed_seconds=union_seconds(waits) if self.waits_are_known else None,
        )
