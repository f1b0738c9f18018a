"""Memory of one device: saved residuals, checkpointing strategies, allocator snapshots."""
