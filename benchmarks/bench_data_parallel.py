"""asv suite of the area data_parallel."""

from benchmarks.suite import publish

publish(globals(), "data_parallel")
