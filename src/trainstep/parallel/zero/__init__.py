"""Sharded optimizers (ZeRO)."""
