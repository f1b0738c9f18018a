"""Clocks, sampling, persistent ranks, error budgets and records."""
