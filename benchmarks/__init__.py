"""The ruler: cases, clocks, suites, records, gate, reports and the command line. Never installed.

Importing it inside asv registers the benchmark type of this project: a method named `sampled` returns a list of
seconds that the ruler measured itself (device events, slowest rank), and asv keeps them as its samples.
"""

import re

try:
    from asv_runner.benchmarks import benchmark_types
    from asv_runner.benchmarks._base import Benchmark
except ImportError:  # not inside asv
    benchmark_types = None
else:

    class SampledBenchmark(Benchmark):
        """A benchmark whose function returns its own samples in seconds."""

        name_regex = re.compile(r"^sampled$")

        def __init__(self, name, func, attr_sources):  # type: ignore[no-untyped-def]
            super().__init__(name, func, attr_sources)
            self.type = "time"
            self.unit = "seconds"

        def run(self, *parameters):  # type: ignore[no-untyped-def]
            """What asv stores: the samples, each of one call."""
            return {"samples": [float(seconds) for seconds in self.func(*parameters)], "number": 1}

    if not any(kind.__name__ == "SampledBenchmark" for kind in benchmark_types):
        benchmark_types.append(SampledBenchmark)
