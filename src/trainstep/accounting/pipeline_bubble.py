"""The idle share of pipeline schedules."""


def bubble_fraction(*, stages: int, microbatches: int, chunks: int = 1) -> float:
    """Idle share of each device in a step: (p-1) / (v m + p-1).

    GPipe and 1F1B with p stages and m micro-batches have v = 1 (Huang et al. 2019; Narayanan et al. 2019);
    interleaved 1F1B runs v chunks of layers a device (Narayanan et al. 2021). Stages are equally long and
    hops free.

    Raises:
        ValueError: an argument below 1.
    """
    if min(stages, microbatches, chunks) < 1:
        raise ValueError(
            f"stages, micro-batches and chunks must be at least 1, got {stages}, {microbatches}, {chunks}"
        )
    return (stages - 1) / (chunks * microbatches + stages - 1)
