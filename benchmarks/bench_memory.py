"""asv suite of the area memory."""

from benchmarks.suite import publish

publish(globals(), "memory")
