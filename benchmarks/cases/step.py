"""End-to-end steps: forward, forward+backward and the full training step of the language model (SPEC 2)."""

import contextlib
import gc
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cases.case import Case, Prepared, Work
from benchmarks.cases.registries import ruler_module
from benchmarks.measure.clock import HostClock, host_clock

AREA = "step"
PHASES = ("forward", "forward_backward", "train_step")
PHASE_SAMPLES = 5
LEARNING_RATE = 1e-5
CAPTURE_WARMUPS = 3  # steps before a CUDA graph is captured
_PRESETS = ruler_module("specs/model.py").MODELS


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One way of running the training step.

    Attributes:
        name: target in case ids.
        attention: implementation by name.
        float32_attention: the one used where products are float32; None for the same.
        compile: what is under torch.compile(fullgraph=True, dynamic=False): "model", forward and loss as one graph;
            "blocks", each block with one graph for all of them, and norm, head and loss as another; None.
        optimizer: "module:class".
        optimizer_options: keyword arguments besides parameters and lr.
        step_in_backward: parameters are updated while the backward pass runs, and weights of products are kept in
            the autocast dtype beside their float32 masters; the optimizer is `MasterAdamW`.
        fused_projections: query, key and value in one product, gate and up in another.
        cuda_graph: every mode captured once and replayed; its phases cannot be told apart.
        peer: what a user would write from PyTorch's parts.
    """

    name: str
    attention: str = "reference"
    float32_attention: str | None = None
    compile: str | None = None
    optimizer: str = "trainstep.model.adamw:AdamW"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    step_in_backward: bool = False
    fused_projections: bool = False
    cuda_graph: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    peer: bool = True


ROWS = {
    row.name: row
    for row in (
        StepRow(name="plain"),
        StepRow(name="plain-compiled", compile="model"),
        StepRow(
            name="best-parts",
            attention="sdpa",
            compile="model",
            optimizer="torch.optim:AdamW",
            optimizer_options={"fused": True},
        ),
        # In float32 Triton's IEEE products, outside the tensor cores, took longer than even materialised scores.
        StepRow(
            name="ours",
            attention="triton",
            float32_attention="sdpa",
            compile="blocks",
            optimizer="trainstep.model.master_weights:MasterAdamW",
            # A fourth of an H100's or H200's multiprocessors: more of them would take the products' time.
            optimizer_options={"programs": 33},
            step_in_backward=True,
            fused_projections=True,
            cuda_graph=True,
            devices=("cuda",),
            peer=False,
        ),
    )
}


# Shape keys of a case and the ModelConfig field each one overrides.
OVERRIDES = {
    "B": "batch_size",
    "N": "n_heads",
    "K": "n_kv_heads",
    "S": "context_length",
    "D": "d_model",
    "F": "d_ff",
    "L": "n_layers",
    "V": "vocab_size",
    "window": "window",
}


def case(
    target: str, phase: str, preset: str, *, dtype: str = "fp32", tier: str = "standard", **shape: int
) -> Case:
    """One step case. `shape` overrides the preset by the keys of OVERRIDES; batch and context are always named."""
    model = ruler_module("specs/model.py").get_model(
        preset, **{OVERRIDES[key]: value for key, value in shape.items()}
    )
    named = {"preset": preset, "B": model.batch_size, "S": model.context_length} | shape
    return Case(
        area=AREA, target=target, phase=phase, shape=named, dtype=dtype, tier=tier, peer=ROWS[target].peer
    )


def cases() -> list[Case]:
    """Every step case."""
    found = [case(row, phase, "toy", S=128, tier="smoke") for row in ROWS for phase in PHASES]
    found += [case("plain", phase, "small", S=128, tier="smoke") for phase in PHASES]
    for preset in ("small", "medium", "large", "xl"):
        for dtype in ("fp32", "amp-bf16"):
            for row in ROWS.values():
                if row.name == "plain-compiled" and preset == "large":
                    continue  # the published table compiles small, medium and xl
                found += [case(row.name, phase, preset, dtype=dtype) for phase in PHASES]
    return found


def runs_here(target: str, device: str) -> None:
    """Raises NotImplementedError, with the reason, where this way of running a step cannot run."""
    from trainstep.specs.model import get_model

    Step(ROWS[target], get_model("toy", context_length=16), "fp32", device)


def config_of(one: Case) -> Any:
    """The ModelConfig that the case names."""
    from trainstep.specs.model import get_model

    overrides = {OVERRIDES[key]: value for key, value in one.shape.items() if key in OVERRIDES}
    return get_model(one.shape["preset"], **overrides)


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


class Step:
    """Model, optimizer and one random batch, with the parts of a step as methods without arguments."""

    def __init__(
        self,
        row: StepRow,
        config: Any,
        dtype_name: str,
        device: str,
        seed: int = 0,
        **optimizer_options: float,
    ) -> None:
        import torch

        from trainstep.attention.registry import get_attention
        from trainstep.model.transformer import TransformerLM
        from trainstep.specs.dtype import get_dtype

        self.row, self.spec = row, get_dtype(dtype_name)
        name = row.attention
        if row.float32_attention and self.spec.autocast is None and self.spec.bytes == 4:
            name = row.float32_attention
        attention = get_attention(name)
        for what, known in ((row.name, row.devices), (f"attention {name}", attention.devices)):
            if device not in known:
                raise NotImplementedError(f"{what} does not run on {device}")
        torch.manual_seed(seed)
        self.model = TransformerLM(
            config.with_overrides(attention=name),
            device=device,
            dtype=getattr(torch, self.spec.torch_name),
            fused_projections=row.fused_projections,
        )
        self.device = device
        self.optimizer = self._optimizer({"lr": LEARNING_RATE, **row.optimizer_options, **optimizer_options})
        self.draw(seed)
        self.scaler = torch.amp.GradScaler(device) if self.spec.autocast == "float16" else None
        self.skipped_steps = 0
        self._loss_of = self._compiled()
        self.loss: Any = None
        self.captured_peak_bytes = 0

    def draw(self, seed: int) -> None:
        """Another random batch."""
        import torch

        config = self.model.config
        tokens = torch.randint(
            config.vocab_size,
            (config.batch_size, config.context_length + 1),
            device=self.device,
            generator=torch.Generator(device=self.device).manual_seed(seed),
        )
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _optimizer(self, options: dict[str, Any]) -> Any:
        import torch

        row, model = self.row, self.model
        make = _load(row.optimizer)
        if not row.step_in_backward:
            return make(model.parameters(), **options)
        if self.spec.torch_name != "float32" or self.spec.autocast == "float16":
            raise NotImplementedError(
                f"{row.name} updates float32 weights from unscaled gradients: fp32, tf32 or amp-bf16, not {self.spec.name}"
            )
        from trainstep.model.master_weights import lower_products
        from trainstep.model.step_in_backward import StepInBackward, layers

        masters = lower_products(model, getattr(torch, self.spec.autocast)) if self.spec.autocast else {}
        return StepInBackward(layers(model), lambda group: make(group, masters, **options))

    def _compiled(self) -> Callable[[Any, Any], Any]:
        """(inputs, targets) -> loss, compiled as the row says."""
        import torch

        from trainstep.model.loss import cross_entropy

        model = self.model

        def loss(inputs: Any, targets: Any) -> Any:
            return cross_entropy(model(inputs), targets)

        def head_loss(x: Any, targets: Any) -> Any:
            return cross_entropy(model.head(model.norm(x)), targets)

        if self.row.compile is None:
            return loss
        torch.compiler.reset()
        if self.row.compile == "model":
            return torch.compile(loss, fullgraph=True, dynamic=False)
        assert self.row.compile == "blocks", self.row.compile
        # The embedding is one kernel with or without the compiler.
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False)
        compiled_head = torch.compile(head_loss, fullgraph=True, dynamic=False)

        def by_blocks(inputs: Any, targets: Any) -> Any:
            return compiled_head(model.run_blocks(model.blocks, model.embedding(inputs), None), targets)

        return by_blocks

    def reset_gradients(self) -> None:
        """Drop the gradients; never inside a timed window."""
        self.optimizer.zero_grad(set_to_none=True)

    def forward(self) -> None:
        """Loss of the batch, with the graph that a backward pass needs."""
        import torch

        autocast: Any = contextlib.nullcontext()
        if self.spec.autocast:
            autocast = torch.autocast(self.device, dtype=getattr(torch, self.spec.autocast))
        with autocast:
            self.loss = self._loss_of(self.inputs, self.targets)

    def backward(self) -> None:
        """Gradients of the loss, scaled under float16 autocast; updates too where the row makes them here."""
        (self.scaler.scale(self.loss) if self.scaler else self.loss).backward()

    def gradients(self) -> None:
        """`backward` that never updates: in modes without an optimizer step."""
        with self.optimizer.paused() if self.row.step_in_backward else contextlib.nullcontext():
            self.backward()

    def update(self) -> None:
        """Optimizer step; a float16 step with non-finite gradients is skipped and counted."""
        if self.scaler is None:
            self.optimizer.step()
            return
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped_steps += self.scaler.get_scale() < scale

    def parts(self, phase: str) -> list[tuple[str, Callable[[], None]]]:
        """The named parts that a mode runs, in order."""
        backward = self.backward if phase == "train_step" else self.gradients
        every = [("forward", self.forward), ("backward", backward), ("optimizer", self.update)]
        return every[: PHASES.index(phase) + 1]

    def capture(self, phase: str) -> Callable[[], None]:
        """The mode as one CUDA graph; returns its replay.

        The gradients are dropped before capture, so that the graph's backward writes instead of accumulating, and
        the optimizer must be capturable. A replay allocates nothing: `captured_peak_bytes` is the memory it works in.
        """
        import torch

        def run() -> None:
            for _, part in self.parts(phase):
                part()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(CAPTURE_WARMUPS):
                self.reset_gradients()
                run()
        torch.cuda.current_stream().wait_stream(side)
        self.reset_gradients()
        self.loss = None
        # A graph left from warming up would accumulate its gradients on the stream of the warm-up.
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        self.captured_peak_bytes = torch.cuda.max_memory_allocated()
        return graph.replay


def _ranged(name: str, part: Callable[[], None]) -> Callable[[], None]:
    """The part in an NVTX range of its name, which costs nothing while ranges are off."""
    from trainstep import ranges

    def run() -> None:
        with ranges.annotate(name):
            part()

    return run


def prepare(one: Case, device: str) -> Prepared:
    """Build the step of one case.

    A training step moves the parameters, so samples do not start from equal values; the work they do is equal.
    """
    import torch

    from benchmarks.cases.step_check import check

    row = ROWS[one.target]
    config = config_of(one)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if one.dtype == "tf32" else "highest")
    step = Step(row, config, one.dtype, device)
    parts = [(name, _ranged(name, part)) for name, part in step.parts(one.phase)]
    host = host_clock(device)
    log: list[dict[str, float]] = []
    graph = step.capture(one.phase) if row.cuda_graph else None

    def run() -> None:
        if graph is not None:
            return graph()
        for _, part in parts:
            part()

    def clock(whole: Callable[[], Any]) -> float:
        if device == "cuda":
            return host(whole)
        # On a CPU a synchronisation is nothing, so one pass gives the phases and their sum.
        log.append(host.phases(parts))
        return sum(log[-1].values())

    def metrics() -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        if device == "cuda":
            found["peak_memory"] = {
                "value": max(step.captured_peak_bytes, torch.cuda.max_memory_allocated()),
                "unit": "byte",
                "better": "lower",
            }
        if len(parts) > 1 and graph is None:
            found |= phase_metrics(step, parts, host, log)
        if step.scaler is not None:
            found["skipped_steps"] = {"value": step.skipped_steps, "unit": "step", "better": None}
        return found

    def close() -> None:
        torch.set_float32_matmul_precision(precision)

    flops = ruler_module("accounting/flops.py").model_flops(config, phase=one.phase, causal_half=True)
    return Prepared(
        run=run,
        clock=clock,
        before=(lambda: None) if graph is not None else step.reset_gradients,
        close=close,
        work=Work(flops=flops.total, tokens=config.batch_size * config.context_length),
        check=lambda: check(one.target, one.dtype, device),
        metrics=metrics,
        state="advances" if one.phase == "train_step" else "same",
    )


def phase_metrics(
    step: Step, parts: list[tuple[str, Callable[[], None]]], host: HostClock, log: list[dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """Seconds of each part, from the log of a CPU's samples or, on CUDA, from a pass of their own."""
    from statistics import median

    if step.device == "cuda":
        for _ in range(PHASE_SAMPLES):
            step.reset_gradients()
            log.append(host.phases(parts))
    kept = log[-PHASE_SAMPLES:]
    found = {}
    for name, _ in parts:
        seconds = [sample[name] for sample in kept]
        found[name] = {"value": median(seconds), "unit": "s", "better": "lower", "samples": seconds}
    return found
