"""The decoder-only Transformer language model and what trains it."""
