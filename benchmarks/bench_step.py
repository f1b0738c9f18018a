"""asv suite of the area step."""

from benchmarks.suite import publish

publish(globals(), "step")
