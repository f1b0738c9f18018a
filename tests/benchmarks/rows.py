"""Rows made by hand for the tests of records, exporters and gate."""

from typing import Any

from benchmarks.measure.record import Row

A, B = "a" * 40, "b" * 40
CASE = "attention/reference/forward/B1,N4,K4,S256,T256,H64,causal,fp32,w1"
CPU = {
    "device": "cpu",
    "cpu": "some cpu",
    "python": "3.11.7",
    "torch": "2.13.0",
    "triton": "3.6.0",
    "world_size": 1,
    "asv": "0.6.6",
}
GPU = {**CPU, "device": "cuda", "gpu": "H200", "driver": "570.1", "cuda": "13.0"}


def row(
    case: str = CASE, seconds: Any = (1.0,), *, env: Any = None, process: int | None = None, **fields: Any
) -> Row:
    """An ok row of commit A, unless told otherwise."""
    env = dict(env or CPU)
    if process is not None:
        env["process"] = process
    values: dict[str, Any] = {
        "version": 1,
        "suite": "run",
        "run": "run-1",
        "machine": "box",
        "commit": A,
        "dirty": False,
        "source_sha256": "5" * 64,
        "ruler_sha256": "6" * 64,
        "started_at": "2026-01-02T03:04:05+00:00",
        "status": "ok",
    }
    if fields.get("status", "ok") != "ok":
        seconds = ()
        values["reason"] = "for the test"
    return Row(case=case, samples_seconds=tuple(seconds), env=env, **{**values, **fields})
