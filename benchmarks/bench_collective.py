"""asv suite of the area collective."""

from benchmarks.suite import publish

publish(globals(), "collective")
