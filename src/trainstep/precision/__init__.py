"""Precision: autocast probe, accumulation experiments, quantisation."""
