"""A discrete-event simulation of schedules: lanes run their tasks in order, each after those it waits for."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """Something that occupies one lane.

    Attributes:
        name: unique.
        lane: what it occupies: a device's compute, a device's communication, ... Tasks of a lane run in the
            order in which they are given.
        seconds: how long.
        after: names of tasks that must have ended, each with a delay that follows its end.
    """

    name: str
    lane: str
    seconds: float
    after: tuple[tuple[str, float], ...] = ()


def simulate(tasks: list[Task]) -> dict[str, tuple[float, float]]:
    """Start and end of every task.

    Raises:
        ValueError: tasks wait for one another in a circle, or for a task that does not exist.
    """
    lanes: dict[str, deque[Task]] = {}
    waiting: dict[str, list[str]] = {}  # task that has not ended -> lanes whose next task waits for it
    for task in tasks:
        lanes.setdefault(task.lane, deque()).append(task)
    free = dict.fromkeys(lanes, 0.0)
    times: dict[str, tuple[float, float]] = {}
    ready = deque(lanes)
    while ready:
        lane = ready.popleft()
        while lanes[lane]:
            task = lanes[lane][0]
            missing = next((name for name, _ in task.after if name not in times), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(lane)
                break
            lanes[lane].popleft()
            start = max([free[lane], *(times[name][1] + delay for name, delay in task.after)])
            free[lane] = start + task.seconds
            times[task.name] = (start, free[lane])
            ready.extend(waiting.pop(task.name, ()))
    if len(times) != len(tasks):
        stuck = next(queue[0] for queue in lanes.values() if queue)
        raise ValueError(f"task {stuck.name!r} waits for a task that never ends")
    return times


def makespan(tasks: list[Task]) -> float:
    """Seconds until the last task has ended."""
    return max((end for _, end in simulate(tasks).values()), default=0.0)


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Order of a stage's passes in the 1F1B schedule (Narayanan et al. 2019, PipeDream-flush).

    The first stage starts `stages` micro-batches before its first backward, the last one only one.
    """
    ahead = min(stages - stage, microbatches)
    order = [("F", i) for i in range(ahead)]
    for i in range(microbatches):
        order.append(("B", i))
        if ahead + i < microbatches:
            order.append(("F", ahead + i))
    return order


def pipeline(
    forward_seconds: list[float], backward_seconds: list[float], microbatches: int, hop_seconds: float = 0.0
) -> list[Task]:
    """Tasks of one pipelined step under 1F1B.

    Args:
        forward_seconds, backward_seconds: of one micro-batch, by stage.
        hop_seconds: from one stage to its neighbour, in either direction, while both go on computing.

    Returns:
        Tasks "F stage microbatch" and "B stage microbatch" on lanes "stage s".
    """
    stages = len(forward_seconds)
    tasks = []
    for stage in range(stages):
        for kind, i in one_forward_one_backward(stage, stages, microbatches):
            if kind == "F":
                after = ((f"F {stage - 1} {i}", hop_seconds),) if stage else ()
                seconds = forward_seconds[stage]
            elif stage == stages - 1:
                after = ((f"F {stage} {i}", 0.0),)
                seconds = backward_seconds[stage]
            else:
                after = ((f"B {stage + 1} {i}", hop_seconds),)
                seconds = backward_seconds[stage]
            tasks.append(Task(f"{kind} {stage} {i}", f"stage {stage}", seconds, after))
    return tasks


def interleaved_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[tuple[str, int, int]]:
    """Order of a device's passes (kind, micro-batch, chunk) in interleaved 1F1B (Narayanan et al. 2021).

    A device holds `chunks` stretches of layers. Micro-batches go through in groups as large as the pipeline:
    a group passes all chunks before the next one starts.

    Raises:
        ValueError: micro-batches do not divide into such groups.
    """
    if microbatches % stages:
        raise ValueError(f"{microbatches} micro-batches do not divide into groups of {stages}")
    total = microbatches * chunks

    def passes(index: int, kind: str) -> tuple[str, int, int]:
        group, within = divmod(index, stages * chunks)
        chunk, member = divmod(within, stages)
        return kind, group * stages + member, chunk if kind == "F" else chunks - 1 - chunk

    ahead = min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)
    order = [passes(i, "F") for i in range(ahead)]
    for i in range(total):
        if ahead + i < total:
            order.append(passes(ahead + i, "F"))
        order.append(passes(i, "B"))
    return order


def interleaved_pipeline(
    stages: int, chunks: int, microbatches: int, forward_seconds: float, backward_seconds: float
) -> list[Task]:
    """Tasks of one step under interleaved 1F1B; the seconds are of one chunk, hops are free.

    Chunk c of device s is stage c * stages + s of the model: the last device passes on to the first.
    """
    last = stages * chunks - 1
    tasks = []
    for device in range(stages):
        for kind, i, chunk in interleaved_order(device, stages, microbatches, chunks):
            place = chunk * stages + device
            if kind == "F":
                after = ((f"F {place - 1} {i}", 0.0),) if place else ()
            else:
                after = ((f"F {place} {i}" if place == last else f"B {place + 1} {i}", 0.0),)
            seconds = forward_seconds if kind == "F" else backward_seconds
            tasks.append(Task(f"{kind} {place} {i}", f"stage {device}", seconds, after))
    return tasks


def sharded_pass(
    layers: int, compute_seconds: float, gather_seconds: float, scatter_seconds: float, *, prefetch: int = 2
) -> list[Task]:
    """Tasks of one pass (forward or backward) over fully sharded layers.

    Weights of layer i are gathered on the communication lane once layer i - prefetch has been computed, which
    bounds how many layers are whole at a time; in backward each layer's gradients are reduce-scattered after
    its computation, on the same lane.
    """
    tasks = []
    for i in range(layers + prefetch):
        if i < layers:
            begun = ((f"compute {i - prefetch}", 0.0),) if i >= prefetch else ()
            tasks.append(Task(f"gather {i}", "communication", gather_seconds, begun))
            tasks.append(Task(f"compute {i}", "compute", compute_seconds, ((f"gather {i}", 0.0),)))
        done = i - prefetch
        if 0 <= done < layers and scatter_seconds:
            tasks.append(
                Task(f"scatter {done}", "communication", scatter_seconds, ((f"compute {done}", 0.0),))
            )
    return tasks
