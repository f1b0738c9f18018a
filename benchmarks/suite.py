"""The asv suite's factory: one benchmark an area and phase, parameters (target, shape).

A benchmark hands asv the device samples themselves (see `benchmarks/__init__.py`), so that asv's statistics see
what the ruler measured. asv knows only "lower is better": it gets seconds, and the report makes the rates.
"""

from itertools import product
from typing import Any, ClassVar

# asv forks each benchmark from a server that has imported the suite: with torch here, once, and not in every process.
import torch

from benchmarks import cases as tables
from benchmarks.cases.case import TIERS, Case, Prepared
from benchmarks.measure.sampling import Policy, take_samples

# asv keys results by position in the parameter lists, so a published series needs lists that do not depend on who
# runs it: all cases of these tiers, everywhere. What a machine cannot run is n/a there.
ASV_TIERS = TIERS[:2]
# At least ten samples a side: fewer can never be flagged by asv's statistics.
ASV_POLICY = Policy(warmup=2, min_samples=10, max_samples=20, cap_seconds=2.0)


def asv_name(case: Case) -> tuple[str, tuple[str, str]]:
    """The benchmark's name in asv and its two parameters."""
    return f"bench_{case.area}.{case.phase.title().replace('_', '')}.sampled", (case.target, case.parameters)


def default_device() -> str:
    """ "cuda" where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def suite(area: str) -> dict[str, type]:
    """The asv classes of one area by name, to be put into the namespace of its bench file."""
    chosen = [case for case in tables.select(area=area) if case.tier in ASV_TIERS]
    phases = dict.fromkeys(case.phase for case in chosen)
    return {
        phase.title().replace("_", ""): _benchmark([case for case in chosen if case.phase == phase])
        for phase in phases
    }


def _benchmark(chosen: list[Case]) -> type:
    by_parameters = {(case.target, case.parameters): case for case in chosen}

    targets = list(dict.fromkeys(case.target for case in chosen))
    shapes = list(dict.fromkeys(case.parameters for case in chosen))

    class Sampled:
        params: ClassVar[Any] = (targets, shapes)
        param_names = ("target", "shape")
        skip_params: ClassVar[Any] = [pair for pair in product(targets, shapes) if pair not in by_parameters]
        # asv's default hashes the text of the method, which would break every series at a reformatting.
        version = str(max(case.version for case in chosen))
        timeout = 600
        prepared: Prepared

        def setup(self, target: str, shape: str) -> None:
            case = by_parameters[target, shape]
            device = default_device()
            if device == "cpu" and case.tier != "smoke":
                raise NotImplementedError("sized for a GPU")
            self.prepared = tables.prepare(case, device)

        def sampled(self, target: str, shape: str) -> list[float]:
            made = self.prepared
            if made.check is not None and not made.check().green:
                raise RuntimeError(f"{target} differs from the reference at {shape}: no speed")
            return take_samples(made.run, clock=made.clock, before=made.before, policy=ASV_POLICY).seconds

        def teardown(self, target: str, shape: str) -> None:
            if hasattr(self, "prepared"):
                self.prepared.close()

    return Sampled


def publish(namespace: dict[str, Any], area: str) -> None:
    """Put an area's benchmark classes into a module, named and placed as asv looks them up."""
    for name, benchmark in suite(area).items():
        benchmark.__name__ = benchmark.__qualname__ = name
        benchmark.__module__ = namespace["__name__"]
        namespace[name] = benchmark
