"""How devices share a step: the axes of a layout, the question it answers and what it costs."""

from dataclasses import dataclass

from trainstep.accounting.calibration import Rates
from trainstep.accounting.execution import Execution
from trainstep.accounting.network import Network
from trainstep.specs.device import DeviceSpec
from trainstep.specs.dtype import get_dtype
from trainstep.specs.model import ModelConfig

EMPTY_AXIS = "every axis of a layout needs at least one device, and a pass at least one sequence"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How devices share a step.

    Attributes:
        tensor: devices that share every layer's matrices and heads.
        context: devices that share every sequence.
        data: groups of sequences.
        shard: devices over which parameters, gradients and optimizer state are divided (FSDP), out of the
            data * context devices that hold the same part of the model; 1 is plain data parallelism.
        pipeline: stages of consecutive blocks.
        microbatch: sequences in one pass.
        checkpoint: blocks keep their input only and run forward again in backward.
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    shard: int = 1
    pipeline: int = 1
    microbatch: int = 1
    checkpoint: bool = False

    @property
    def devices(self) -> int:
        """Devices in use."""
        return self.tensor * self.context * self.data * self.pipeline

    def __str__(self) -> str:
        axes = {
            "TP": self.tensor,
            "CP": self.context,
            "DP": self.data,
            "FSDP": self.shard,
            "PP": self.pipeline,
        }
        return " ".join(f"{name}{size}" for name, size in axes.items() if size > 1) or "one device"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of the planner.

    Attributes:
        config: the model; its batch_size is not looked at.
        batch: sequences a step, over all devices.
        device, network, rates: what it runs on.
        execution: how each device runs its part.
        dtype: of the computation, see `specs.dtype`.
        state: how parameters and optimizer state are kept, a key of `memory.STATE_BYTES`.
    """

    config: ModelConfig
    batch: int
    device: DeviceSpec
    network: Network
    rates: Rates
    execution: Execution
    dtype: str
    state: str

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation, and of a weight on its way between devices."""
        spec = get_dtype(self.dtype)
        return 2 if spec.autocast else spec.bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout with what it costs.

    Attributes:
        seconds: of a step, the sum of `parts`.
        parts: seconds by cause, on the slowest stage: products, attention, elementwise, host, optimizer;
            exposed communication as tensor, context, sharding, gradients; pipeline (bubble and hops).
        memory_bytes: peak of the fullest device; `memory` has its parts.
        model_flops: of the whole step, without recomputation.
        mfu: over the devices in use.
    """

    layout: Layout
    seconds: float
    parts: dict[str, float]
    memory_bytes: float
    memory: dict[str, float]
    model_flops: float
    mfu: float

    @property
    def bound(self) -> str:
        """The cause that takes the most time."""
        return max(self.parts, key=lambda part: self.parts[part])


def refuse(question: Question, layout: Layout) -> str | None:
    """Why a layout is impossible whatever the memory, in one sentence; None when it is possible."""
    config, batch = question.config, question.batch
    width = layout.data * layout.microbatch
    if min(layout.tensor, layout.context, layout.data, layout.shard, layout.pipeline, layout.microbatch) < 1:
        return EMPTY_AXIS
    if batch < layout.data:
        return f"a batch of {batch} sequences is smaller than {layout.data} data-parallel ranks"
    if batch % width:
        return f"{batch} sequences do not divide into {layout.data} ranks of {layout.microbatch} a pass"
    for heads, name in ((config.n_heads, "query heads"), (config.kv_heads, "key/value heads")):
        if heads % layout.tensor:
            return f"{heads} {name} are not divisible by {layout.tensor} tensor-parallel ranks"
    if config.d_ff % layout.tensor:
        return f"d_ff {config.d_ff} is not divisible by {layout.tensor} tensor-parallel ranks"
    if config.context_length % layout.context:
        return f"a context of {config.context_length} is not divisible by {layout.context} context ranks"
    if config.n_layers % layout.pipeline:
        return f"{config.n_layers} layers are not divisible by {layout.pipeline} pipeline stages"
    if layout.data * layout.context % layout.shard:
        return f"{layout.data * layout.context} ranks are not divisible into shard groups of {layout.shard}"
    if layout.context > 1 and question.execution.attention != "flash":
        return "context parallelism needs flash attention: scores that are materialised are not passed round"
    return None
