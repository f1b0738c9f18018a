"""How long a step takes on many devices, what it needs, and which layout is best.

A layout cuts the work five ways (Megatron-LM, ZeRO and their successors): tensor parallel with sequence
parallel norms, context parallel with ring attention, fully sharded and plain data parallel, pipeline parallel
under 1F1B. Neighbours in that order lie closest in the network, the pipeline spanning the widest.

The step time is a formula; `schedule` turns the same layout into tasks that `simulation` runs event by event.
"""

from dataclasses import dataclass
from functools import lru_cache

from trainstep.accounting import params
from trainstep.accounting.execution import Execution, Work, block_work, head_work, optimizer_work, tensors
from trainstep.accounting.flops import model_flops
from trainstep.accounting.layout import Layout, Plan, Question, refuse
from trainstep.accounting.memory import STATE_BYTES, block_activation_bytes
from trainstep.accounting.simulation import Task, makespan, pipeline, sharded_pass
from trainstep.accounting.step_time import Spent, device_seconds, host_seconds, with_host
from trainstep.specs.model import ModelConfig


@lru_cache(maxsize=256)
def _works(config: ModelConfig, execution: Execution, dtype: str) -> tuple[Work, Work, Work, Work, Work]:
    """Work of one sequence: block forward, recomputed and backward; head forward and backward."""
    return (
        block_work(config, execution, dtype, sequences=1, phase="forward"),
        block_work(config, execution, dtype, sequences=1, phase="recompute"),
        block_work(config, execution, dtype, sequences=1, phase="backward"),
        head_work(config, execution, dtype, sequences=1, phase="forward"),
        head_work(config, execution, dtype, sequences=1, phase="backward"),
    )


@lru_cache(maxsize=256)
def _sequence_activations(config: ModelConfig, attention: str, element_bytes: int) -> int:
    """Bytes one block keeps for one sequence."""
    one = config.with_overrides(batch_size=1)
    return sum(block_activation_bytes(one, attention=attention, element_bytes=element_bytes).values())


@lru_cache(maxsize=256)
def _sequence_flops(config: ModelConfig) -> float:
    one = config.with_overrides(batch_size=1)
    return model_flops(one, phase="train_step", causal_half=True).total


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """One micro-batch on one stage: seconds by cause, and what the simulation needs of the layers."""

    forward: Spent
    backward: Spent
    head: Spent  # forward and backward, on the last stage only
    head_forward: float
    tensor: tuple[float, float]  # exposed, forward and backward
    context: tuple[float, float]
    gather: float  # a layer
    scatter: float
    layers: int

    @property
    def layer_forward(self) -> float:
        """Seconds of a layer's forward pass without its sharding."""
        return (self.forward.total + self.tensor[0] + self.context[0]) / self.layers

    @property
    def layer_backward(self) -> float:
        """The same of its backward pass, with recomputation."""
        return (self.backward.total + self.tensor[1] + self.context[1]) / self.layers


def _passes(question: Question, layout: Layout) -> _Passes:
    config, given, execution = question.config, question.rates, question.execution
    ranks, layers = layout.tensor * layout.context, config.n_layers // layout.pipeline
    scale = layout.microbatch / ranks
    works = _works(config, execution, question.dtype)
    block_forward, block_again, block_backward, head_forward, head_backward = works

    def on_device(work: Work, phase: str, factor: float) -> Spent:
        spent = device_seconds(
            work,
            given,
            dtype=question.dtype,
            head_dim=config.head_dim,
            phase=phase,
            compiled=execution.compiled,
        )
        return spent.times(factor)

    entering = given.host_compiled_seconds / 2 if execution.compiled else 0.0

    def launching(work: Work, phase: str) -> float:
        return layers * host_seconds(work, execution, given, phase) + entering

    once = on_device(block_forward, "forward", scale * layers)
    forward = with_host(once, launching(block_forward, "forward"))
    back = on_device(block_backward, "backward", scale * layers)
    backward = with_host(back, launching(block_backward, "backward"))
    if layout.checkpoint:
        again = on_device(block_again, "recompute", scale * layers)
        backward = with_host(
            back + again, launching(block_backward, "backward") + launching(block_again, "recompute")
        )
    head_once = on_device(head_forward, "forward", scale)
    head = head_once + on_device(head_backward, "backward", scale)

    network, element = question.network, question.element_bytes
    tokens = layout.microbatch * config.context_length // layout.context
    reduce = network.seconds("all_reduce", tokens * config.d_model * element, layout.tensor)
    times = (2, 4) if layout.checkpoint else (2, 2)
    tensor = (layers * times[0] * reduce, layers * times[1] * reduce)

    # Ring attention: each rank's keys and values go round, hidden behind the attention of those that have
    # come.
    held = 2 * tokens * config.kv_heads * config.head_dim // layout.tensor * element
    ring = (layout.context - 1) * network.hop(held, layout.context, layout.tensor)
    hidden = once.attention / layers, back.attention / layers
    exposed_forward = max(0.0, ring - hidden[0])
    exposed_backward = max(0.0, 2 * ring - hidden[1]) + (exposed_forward if layout.checkpoint else 0.0)

    block = params.block(config) / layout.tensor
    gather = network.seconds("all_gather", block * element, layout.shard, layout.tensor)
    gradient = STATE_BYTES[question.state]["gradients"]
    scatter = network.seconds("reduce_scatter", block * gradient, layout.shard, layout.tensor)
    return _Passes(
        forward=forward,
        backward=backward,
        head=head,
        head_forward=head_once.total,
        tensor=tensor,
        context=(layers * exposed_forward, layers * exposed_backward),
        gather=gather,
        scatter=scatter,
        layers=layers,
    )


def sharded_seconds(layers: int, compute: float, gather: float, scatter: float) -> float:
    """Seconds of a pass over sharded layers, see `simulation.sharded_pass`.

    Either computing is the longer lane, with the first gather before and the last reduce-scatter after it; or
    communicating is, and then the last layer is computed beside the reduce-scatters of the two before it.
    """
    beside = min(layers - 1, 2)
    communicating = layers * gather + (layers - beside) * scatter + max(compute, beside * scatter)
    return max(gather + layers * compute + scatter, communicating)


def _gradient_sync(question: Question, layout: Layout, count: float) -> float:
    """Seconds of the all-reduce of a number of gradients over the groups that hold the same shard."""
    replicas = layout.data * layout.context // layout.shard
    size = count / layout.tensor / layout.shard * STATE_BYTES[question.state]["gradients"]
    return question.network.seconds("all_reduce", size, replicas, layout.tensor * layout.shard)


def _ends(question: Question, layout: Layout) -> tuple[float, float]:
    """Seconds of sharding and of gradient synchronisation that embedding and head add to a step.

    Both are gathered before anything else can start, and the embedding's gradient is the last to be ready, so
    none of it hides. The head's all-reduce starts first and hides.
    """
    config, network = question.config, question.network
    matrix = config.vocab_size * config.d_model
    count = matrix * (2 if layout.pipeline == 1 and not config.tie_embeddings else 1) / layout.tensor
    gather = network.seconds("all_gather", count * question.element_bytes, layout.shard, layout.tensor)
    gradient = count * STATE_BYTES[question.state]["gradients"]
    scatter = network.seconds("reduce_scatter", gradient, layout.shard, layout.tensor)
    return gather + scatter, _gradient_sync(question, layout, matrix)


def _optimizer(question: Question, layout: Layout) -> Spent:
    config, given, execution = question.config, question.rates, question.execution
    work = optimizer_work(config, execution, question.state)
    rate = given.fused_bytes_per_second if execution.optimizer.kernels == 0 else given.eager_bytes_per_second
    moved = work.moved_bytes / (layout.tensor * layout.pipeline * layout.shard)
    launched = execution.optimizer.kernels * tensors(config) / layout.pipeline
    return with_host(Spent(elementwise=moved / rate), launched * given.host_kernel_seconds["optimizer"])


def memory(question: Question, layout: Layout) -> dict[str, float]:
    """Bytes of the fullest device by part: parameters, gradients, optimizer (with a master copy), gathered
    layers, activations, head.

    With a single micro-batch gradients appear as activations go, so the peak is the larger of all activations
    with none of the gradients, and of one block's activations with all of them.
    """
    config, state = question.config, STATE_BYTES[question.state]
    cut = layout.tensor * layout.context
    share = params.block(config) * (config.n_layers // layout.pipeline) / layout.tensor
    ends = config.vocab_size * config.d_model / layout.tensor  # embedding or head; both without a pipeline
    share += ends * (2 if layout.pipeline == 1 and not config.tie_embeddings else 1)
    held = share / layout.shard
    kind = question.execution.attention
    element = question.element_bytes
    block = layout.microbatch * _sequence_activations(config, kind, element) / cut
    tokens = layout.microbatch * config.context_length / cut
    boundary = tokens * config.d_model * element
    microbatches = question.batch // (layout.data * layout.microbatch)
    in_flight = min(layout.pipeline, microbatches)
    layers = config.n_layers // layout.pipeline
    kept = layers * (boundary if layout.checkpoint else block)
    logits = 0.0 if question.execution.fused_loss else tokens * config.vocab_size * (element + 4)
    gathered = 0.0
    if layout.shard > 1:
        gathered = (2 * params.block(config) / layout.tensor + ends) * element
    parts = {
        "parameters": held * state["parameters"],
        "optimizer": held * (state["optimizer"] + state["master"]),
        "gathered": gathered,
    }
    gradients = held * state["gradients"]
    full = in_flight * kept + (block if layout.checkpoint else 0.0)
    if microbatches == 1:
        early, late = full + logits, gradients + block + boundary
        if late > early:
            return {**parts, "gradients": gradients, "activations": block + boundary, "head": 0.0}
        return {**parts, "gradients": 0.0, "activations": full, "head": logits}
    return {**parts, "gradients": gradients, "activations": full, "head": logits}


def _hop(question: Question, layout: Layout) -> float:
    """Seconds from one stage to the next: each tensor-parallel rank passes its part of the stream."""
    tokens = layout.microbatch * question.config.context_length // layout.context
    size = tokens * question.config.d_model * question.element_bytes / layout.tensor
    return question.network.hop(size, layout.pipeline, layout.tensor * layout.context * layout.data)


def _stalls(stages: int, microbatches: int) -> int:
    """How often a pipeline under 1F1B waits for a hop there and back, after its first pass.

    The stage that is k from the end has k micro-batches under way, then waits while the first of them crosses
    k - 1 hops twice; the last stage waits for whichever k makes this last longest. What the last stage does
    more than the others (its head) hides as much of each wait.
    """
    later = microbatches - 1
    if stages == 1 or later == 0:
        return 0
    groups = -(-later // stages)
    return max(groups * (later // groups - 1), later // stages * (stages - 1))


def evaluate(question: Question, layout: Layout) -> Plan:
    """What a layout costs.

    Raises:
        ValueError: the layout is impossible (see `refuse`). A plan that does not fit the device is returned:
            compare its `memory_bytes`.
    """
    reason = refuse(question, layout)
    if reason is not None:
        raise ValueError(reason)
    passes = _passes(question, layout)
    microbatches = question.batch // (layout.data * layout.microbatch)
    stages, layers = layout.pipeline, passes.layers

    plain = layers * (passes.layer_forward + passes.layer_backward)
    forward = sharded_seconds(layers, passes.layer_forward, passes.gather, 0.0)
    last_backward = sharded_seconds(layers, passes.layer_backward, passes.gather, passes.scatter)
    pass_seconds = forward + last_backward
    # 1F1B: the last stage, which also has the head, paces the others; their first and last passes lie
    # outside.
    stage = pass_seconds + passes.head.total
    bubble = (stages - 1) * pass_seconds
    hop = _hop(question, layout)
    hops = 2 * hop * (stages - 1) + _stalls(stages, microbatches) * max(0.0, 2 * hop - passes.head.total)

    sync = _gradient_sync(question, layout, layers * params.block(question.config))
    ends_sharding, ends_sync = _ends(question, layout)
    last = sync / layers  # the last bucket has nothing to hide behind
    exposed = min(sync, last + max(0.0, sync - last - last_backward * (layers - 1) / layers)) + ends_sync
    optimizer = _optimizer(question, layout)

    spent = (passes.forward + passes.backward + passes.head).times(microbatches)
    parts = {
        "products": spent.products,
        "attention": spent.attention,
        "elementwise": spent.elementwise,
        "host": spent.host + optimizer.host,
        "optimizer": optimizer.elementwise,
        "tensor": microbatches * sum(passes.tensor),
        "context": microbatches * sum(passes.context),
        "sharding": microbatches * max(0.0, pass_seconds - plain) + ends_sharding,
        "gradients": exposed,
        "pipeline": bubble + hops,
    }
    seconds = sum(parts.values())
    whole = microbatches * stage + bubble + hops + exposed + ends_sharding + optimizer.total
    assert abs(seconds - whole) < 1e-9 * seconds, "the parts do not add up to the step"
    flops = question.batch * _sequence_flops(question.config)
    peak = question.device.peak(question.dtype)
    assert peak is not None, "rates() refuses a device without a peak"
    need = memory(question, layout)
    return Plan(
        layout=layout,
        seconds=seconds,
        parts=parts,
        memory_bytes=sum(need.values()),
        memory=need,
        model_flops=flops,
        mfu=flops / seconds / (peak * layout.devices),
    )


def schedule(question: Question, layout: Layout) -> tuple[list[Task], float]:
    """The same step as tasks, and the seconds that no task covers (embedding and head's sharding, optimizer).

    Stages run 1F1B; every pass of a stage is itself simulated over its sharded layers; the gradient
    all-reduce of each layer starts when the last micro-batch has left it.
    """
    passes = _passes(question, layout)
    layers, stages = passes.layers, layout.pipeline
    microbatches = question.batch // (layout.data * layout.microbatch)
    forward = makespan(sharded_pass(layers, passes.layer_forward, passes.gather, 0.0))
    backward = makespan(sharded_pass(layers, passes.layer_backward, passes.gather, passes.scatter))
    forwards, backwards = [forward] * stages, [backward] * stages
    forwards[-1] += passes.head_forward
    backwards[-1] += passes.head.total - passes.head_forward
    tasks = pipeline(forwards, backwards, microbatches, _hop(question, layout))
    bucket = _gradient_sync(question, layout, params.block(question.config))
    if bucket:
        for stage in range(stages):
            for layer in range(layers):  # the first of them is ready when the pass has one layer behind it
                early = -backward * (layers - 1 - layer) / layers
                ready = (f"B {stage} {microbatches - 1}", early)
                tasks.append(Task(f"reduce {stage} {layer}", f"network {stage}", bucket, (ready,)))
    return tasks, sum(_ends(question, layout)) + _optimizer(question, layout).total


def simulated_seconds(question: Question, layout: Layout) -> float:
    """Step time of a layout by discrete-event simulation."""
    tasks, after = schedule(question, layout)
    return makespan(tasks) + after
