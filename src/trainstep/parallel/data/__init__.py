"""Data parallelism: one protocol, one file a variant."""
