"""asv suite of the area attention."""

from benchmarks.suite import publish

publish(globals(), "attention")
