"""How a step is executed, and the work that each way asks of a device: products, attention, bytes, kernels.

Three ways, as the measured peers differ. The eager figures are counted, operation by operation, from this
repository's plain model with a hand-written softmax (a test counts them again); the fused ones are what
remains when every chain of pointwise operations between two matrix products is one kernel that reads its
inputs and writes its outputs once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from trainstep.accounting import params
from trainstep.accounting.flops import KERNEL_BACKWARD, layer_window, visible_pairs
from trainstep.specs.dtype import get_dtype
from trainstep.specs.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """AdamW as a number of kernels a tensor and of values read or written a parameter.

    textbook: every operation of the formula makes a new tensor (14 kernels, 33 values); fused: one kernel for
    all tensors reads p, g, m, v and writes p, m, v.
    """

    kernels: int
    values: int


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One way of running the same step.

    Attributes:
        name: for the command line.
        compiled: pointwise chains are fused and blocks are entered as one call.
        attention: "materialised" or "flash".
        fused_loss: logits are never held in full.
        optimizer: how AdamW runs.
        says: one line for reports.
    """

    name: str
    compiled: bool
    attention: str
    fused_loss: bool
    optimizer: OptimizerKind
    says: str


_TEXTBOOK = OptimizerKind(kernels=14, values=33)
_FUSED = OptimizerKind(kernels=0, values=7)

EXECUTIONS = {
    row.name: row
    for row in (
        Execution(
            name="plain",
            compiled=False,
            attention="materialised",
            fused_loss=False,
            optimizer=_TEXTBOOK,
            says="eager, scores materialised, AdamW a tensor at a time",
        ),
        Execution(
            name="plain-compiled",
            compiled=True,
            attention="materialised",
            fused_loss=False,
            optimizer=_TEXTBOOK,
            says="compiled, scores materialised, AdamW a tensor at a time",
        ),
        Execution(
            name="fused",
            compiled=True,
            attention="flash",
            fused_loss=True,
            optimizer=_FUSED,
            says="compiled, flash attention, fused loss and AdamW",
        ),
    )
}


def get_execution(name: str) -> Execution:
    """Look an execution up by name.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in EXECUTIONS:
        raise ValueError(f"unknown execution {name!r}; known: {', '.join(EXECUTIONS)}")
    return EXECUTIONS[name]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes moved by what is no matrix product, a value of each kind: of [B, S, D], [B, S, F] and [B, N, S,
    S] tensors, and of a block's weights (autocast casts them, and their gradients, at every use)."""

    stream: float
    hidden: float
    scores: float
    weights: float = 0.0


# By arithmetic ("fp32"; "amp": low-precision products over float32 tensors; "half": 16-bit tensors) and
# phase.
EAGER_TRAFFIC: Mapping[tuple[str, str], Traffic] = MappingProxyType(
    {
        ("fp32", "forward"): Traffic(stream=166, hidden=20, scores=49),
        ("fp32", "backward"): Traffic(stream=386, hidden=36, scores=120),
        ("amp", "forward"): Traffic(stream=209, hidden=10, scores=46, weights=6),
        ("amp", "backward"): Traffic(stream=437, hidden=18, scores=107, weights=6),
        ("half", "forward"): Traffic(stream=195, hidden=10, scores=46),
        ("half", "backward"): Traffic(stream=389, hidden=18, scores=107),
    }
)
# Forward, values of a [B, S, D] tensor: norm 2, rotation of q and k 4, residual with norm 4, residual 3; of
# [B, S, F]: SwiGLU 3; of the scores: softmax 3. Backward: rotation 4, two norms with their sums of gradients
# 11; SwiGLU 5; softmax 4. Times the element size, the stream being float32 under autocast.
FUSED_TRAFFIC: Mapping[tuple[str, str], Traffic] = MappingProxyType(
    {
        ("fp32", "forward"): Traffic(stream=13 * 4, hidden=3 * 4, scores=3 * 4),
        ("fp32", "backward"): Traffic(stream=15 * 4, hidden=5 * 4, scores=4 * 4),
        ("amp", "forward"): Traffic(stream=13 * 4, hidden=3 * 2, scores=3 * 2, weights=6),
        ("amp", "backward"): Traffic(stream=15 * 4, hidden=5 * 2, scores=4 * 2, weights=6),
        ("half", "forward"): Traffic(stream=13 * 2, hidden=3 * 2, scores=3 * 2),
        ("half", "backward"): Traffic(stream=15 * 2, hidden=5 * 2, scores=4 * 2),
    }
)
# Kernels that a block launches. Compiled: 9 products forward and 18 backward, 8 and 15 fused chains, and
# under autocast 7 casts of weights and of their gradients.
EAGER_KERNELS: Mapping[tuple[str, str], int] = MappingProxyType(
    {
        ("fp32", "forward"): 51,
        ("fp32", "backward"): 95,
        ("amp", "forward"): 69,
        ("amp", "backward"): 115,
        ("half", "forward"): 61,
        ("half", "backward"): 107,
    }
)
FUSED_KERNELS: Mapping[tuple[str, str], int] = MappingProxyType(
    {
        ("fp32", "forward"): 17,
        ("fp32", "backward"): 33,
        ("amp", "forward"): 24,
        ("amp", "backward"): 40,
        ("half", "forward"): 17,
        ("half", "backward"): 33,
    }
)
# The same for the loss, a value of the [B, S, V] logits: log-sum-exp and pick forward, softmax minus one
# backward.
EAGER_LOSS = {"forward": 24.0, "backward": 40.0}
FUSED_LOSS = {"forward": 6.0, "backward": 6.0}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a phase asks of a device.

    Attributes:
        product_flops: of dense matrix products, materialised scores included.
        attention_pairs: query-key pairs times heads that a flash kernel visits.
        moved_bytes: by everything that is no matrix product.
        kernels: launched from the host.
    """

    product_flops: float = 0.0
    attention_pairs: float = 0.0
    moved_bytes: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            product_flops=self.product_flops + other.product_flops,
            attention_pairs=self.attention_pairs + other.attention_pairs,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            kernels=self.kernels + other.kernels,
        )


def arithmetic(dtype: str) -> str:
    """ "fp32", "amp" or "half": the row of the tables above for a dtype of `specs.dtype`."""
    spec = get_dtype(dtype)
    if spec.autocast:
        return "amp"
    return "half" if spec.bytes == 2 else "fp32"


def block_work(config: ModelConfig, execution: Execution, dtype: str, *, sequences: int, phase: str) -> Work:
    """Work of one block (the mean over layers where windows differ) for a number of sequences.

    Args:
        phase: "forward", "backward", or "recompute": the forward pass that a checkpointed block repeats,
            which stops before its last product, as nothing in the backward pass asks for the block's output.
    """
    if phase == "recompute":
        forward = block_work(config, execution, dtype, sequences=sequences, phase="forward")
        down = 2.0 * sequences * config.context_length * config.d_ff * config.d_model
        return replace(forward, product_flops=forward.product_flops - down, kernels=forward.kernels - 2)
    kind = arithmetic(dtype)
    s, d, width = config.context_length, config.d_model, config.n_heads * config.head_dim
    tokens = sequences * s
    weights = params.block(config)
    factor = 1.0 if phase == "forward" else 2.0
    scores = sequences * config.n_heads * s * s
    matrices = 2 * d * d + 2 * d * config.kv_heads * config.head_dim + 3 * d * config.d_ff
    products = factor * 2.0 * tokens * matrices
    traffic = (FUSED_TRAFFIC if execution.compiled else EAGER_TRAFFIC)[kind, phase]
    moved = tokens * (d * traffic.stream + config.d_ff * traffic.hidden) + weights * traffic.weights
    pairs = 0.0
    if execution.attention == "flash":
        windows = [layer_window(config, layer) for layer in range(config.n_layers)]
        visible = [s * s / 2 if w is None or w >= s else _visible(s, w) for w in windows]
        pairs = sequences * config.n_heads * sum(visible) / config.n_layers
    else:
        products += factor * 4.0 * sequences * s * s * width
        moved += scores * traffic.scores
    kernels = (FUSED_KERNELS if execution.compiled else EAGER_KERNELS)[kind, phase]
    return Work(product_flops=products, attention_pairs=pairs, moved_bytes=moved, kernels=kernels)


def _visible(length: int, window: int) -> int:
    return visible_pairs(queries=length, keys=length, causal=True, window=window)


def head_work(config: ModelConfig, execution: Execution, dtype: str, *, sequences: int, phase: str) -> Work:
    """Work of output projection and loss."""
    tokens = sequences * config.context_length
    factor = 1.0 if phase == "forward" else 2.0
    loss = (FUSED_LOSS if execution.fused_loss else EAGER_LOSS)[phase]
    kernels = 8 if execution.compiled else 24
    return Work(
        product_flops=factor * 2.0 * tokens * config.d_model * config.vocab_size,
        moved_bytes=loss * tokens * config.vocab_size,
        kernels=kernels,
    )


def optimizer_work(config: ModelConfig, execution: Execution, precision: str) -> Work:
    """Work of AdamW over all parameters.

    Args:
        precision: how the state is kept, a key of `memory.STATE_BYTES`. With a master copy the fused update
            also writes the 16-bit weights.
    """
    element = {"fp32": 4, "mixed": 4, "bf16": 2}[precision]
    extra = 2 if precision == "mixed" else 0
    values = execution.optimizer.values
    return Work(
        moved_bytes=float(params.count(config) * (values * element + extra)),
        kernels=execution.optimizer.kernels * tensors(config),
    )


def tensors(config: ModelConfig) -> int:
    """Parameter tensors of a model: 9 a block (11 with QK-norm), embedding, last norm and an untied head."""
    return config.n_layers * (11 if config.qk_norm else 9) + 2 + (0 if config.tie_embeddings else 1)


def attention_kernel_flops(pairs: float, head_dim: int, phase: str) -> float:
    """FLOPs by which a flash kernel's rate is counted, see `flops.attention_flops`."""
    return (KERNEL_BACKWARD if phase == "backward" else 1.0) * 4.0 * pairs * head_dim
