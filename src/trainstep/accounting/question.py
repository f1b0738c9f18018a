"""From names and numbers to a question for the planner."""

from trainstep.accounting.calibration import rates
from trainstep.accounting.execution import get_execution
from trainstep.accounting.layout import Question
from trainstep.accounting.memory import STATE_BYTES, state_precision
from trainstep.accounting.network import build
from trainstep.specs.device import get_device
from trainstep.specs.dtype import get_dtype
from trainstep.specs.model import ModelConfig


def ask(
    config: ModelConfig,
    *,
    devices: int,
    device: str = "h200",
    batch: int | None = None,
    dtype: str | None = None,
    state: str | None = None,
    execution: str = "fused",
    per_node: int = 8,
    between_bytes_per_second: float = 50e9,
) -> Question:
    """Put a question together.

    Args:
        devices: at hand; nodes hold `per_node` of them and are joined by one port a device.
        batch: sequences a step over all devices; None takes the configuration's batch a device.
        dtype: of the computation; None takes the configuration's.
        state: a key of `memory.STATE_BYTES`; None keeps 16-bit dtypes in 16 bits and everything else in
        float32. execution: a name of `execution.EXECUTIONS`.

    Raises:
        ValueError: an unknown name, a number below 1, or a device that states no peak for the dtype.
    """
    for name, value in (("devices", devices), ("devices a node", per_node), ("batch", batch)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    dtype = config.dtype if dtype is None else get_dtype(dtype).name
    if state is None:
        state = state_precision(dtype)
    if state not in STATE_BYTES:
        raise ValueError(f"unknown state {state!r}; known: {', '.join(STATE_BYTES)}")
    chosen = get_device(device)
    given = rates(chosen, dtype)
    return Question(
        config=config,
        batch=config.batch_size * devices if batch is None else batch,
        device=chosen,
        network=build(
            chosen,
            devices,
            per_node=per_node,
            between_bytes_per_second=between_bytes_per_second,
            link_share=given.link_share,
            call_seconds=given.collective_seconds,
        ),
        rates=given,
        execution=get_execution(execution),
        dtype=dtype,
        state=state,
    )
