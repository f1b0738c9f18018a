"""asv suite of the area sharding."""

from benchmarks.suite import publish

publish(globals(), "sharding")
