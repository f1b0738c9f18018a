"""Training over several processes: launch, collectives, data parallelism, sharding."""
