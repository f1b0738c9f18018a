"""What only a GPU can show: its allocator, its kernels, and host memory that is another memory."""

import pytest
import torch

from benchmarks.cases import memory as table
from benchmarks.measure.memory import PeakMeter, release
from benchmarks.measure.profile import attention_ranges, attention_split, kernel_table, profile_parts
from tests.memory.plain_block import plain_blocks
from trainstep.memory import checkpointing
from trainstep.memory.live import LiveBytes
from trainstep.memory.snapshot import record_history, timeline
from trainstep.specs.model import get_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POLICIES = ("every-block", "groups-2", "recursive", "selective", "offload")
CONFIG = get_model("small", n_layers=6, context_length=512)


def gradients(policy, dtype):
    torch.manual_seed(0)
    blocks, positions = plain_blocks(5, d_model=128, length=128, device="cuda", dropout=0.5)
    x = torch.randn(4, 128, 128, device="cuda", requires_grad=True)
    torch.manual_seed(1)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
        y = checkpointing.run(blocks, x, positions, policy=policy)
    y.float().square().mean().backward()
    state = torch.cuda.get_rng_state()
    return [x.grad, *(parameter.grad for parameter in blocks.parameters())], state


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
def test_bit_equal_with_dropout(policy, dtype):
    (plain, state), (again, state_again) = gradients("none", dtype), gradients(policy, dtype)
    assert all(torch.equal(first, second) for first, second in zip(plain, again, strict=True))
    assert torch.equal(state, state_again)


@pytest.mark.parametrize("dtype", ["fp32", "amp-bf16"])
@pytest.mark.parametrize("policy", ("none", *POLICIES))
def test_the_allocators_peak_is_within_ten_percent_of_the_prediction(policy, dtype):
    expected = table.predict(CONFIG, dtype, policy, "forward_backward", "cuda")
    step = table.build(CONFIG, dtype, "cuda", policy)
    for _ in range(2):
        step.reset_gradients()
        step.loss = None
        with PeakMeter("cuda") as meter:
            for name, part in step.parts("forward_backward"):
                with meter.phase(name):
                    part()
    del step
    release("cuda")
    assert meter.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.1)


@pytest.mark.parametrize("dtype", ["fp32", "amp-bf16"])
def test_predicted_host_memory_is_what_pinned_blocks_take(dtype):
    expected = table.predict(CONFIG, dtype, "offload", "forward_backward", "cuda")
    step = table.build(CONFIG, dtype, "cuda", "offload")
    release("cuda")  # pinned blocks of before too
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    step.forward()
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    del step
    release("cuda")
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= before
    assert taken == pytest.approx(expected.host_bytes, rel=0.01)


def test_what_softmax_backward_takes_inside():
    scores = torch.randn(4, 512, 2048, device="cuda", requires_grad=True)
    y = scores.softmax(-1)
    gradient = torch.ones_like(y)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    with LiveBytes("cuda") as live:
        y.backward(gradient)
    assert live.peak_bytes == 2 * scores.nbytes
    assert torch.cuda.max_memory_allocated() - start == pytest.approx(live.peak_bytes, rel=0.01)


def test_a_real_history_has_phases_frames_and_the_allocators_peak(tmp_path):
    step = table.build(CONFIG, "fp32", "cuda", "none")
    for _ in range(2):
        step.reset_gradients()
        step.loss = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with record_history("cuda", tmp_path / "step.pickle") as history:
            for name, part in step.parts("train_step"):
                history.phase(name)
                part()
        peak = torch.cuda.max_memory_allocated()
    seen = timeline(history.snapshot)
    assert seen.peak_bytes == pytest.approx(peak, rel=0.01)
    assert [name for _, name in seen.phases] == ["forward", "backward", "optimizer"]
    assert "trainstep/" in seen.allocations[0].frame
    before = len(history.snapshot["device_traces"][0])
    torch.ones(10, device="cuda")
    assert len(torch.cuda.memory._snapshot()["device_traces"][0]) <= before
    del step
    release("cuda")


def test_kernels_of_a_real_step(tmp_path):
    step = table.build(CONFIG, "fp32", "cuda", "none")
    with attention_ranges(step.model):
        kernels = profile_parts(
            step.parts("train_step"), tmp_path / "t.json", device="cuda", before=step.reset_gradients
        )
    tables = {phase: kernel_table(kernels, phase) for phase in ("forward", "backward", "optimizer")}
    assert all(tables.values())
    products = sum(line.calls for line in tables["forward"] if line.kind == "matmul")
    assert products >= CONFIG.n_layers * (7 + 2) + 1  # projections, attention's two products, and the head
    assert attention_split(kernels).seen
    assert all(kernel.lane.startswith("stream") for kernel in kernels)
    del step
    release("cuda")


def test_released_memory_is_all_of_it_and_products_leave_no_workspace():
    from benchmarks.measure.memory import release

    release("cuda")
    before = torch.cuda.memory_allocated()
    x = torch.ones(256, 256, device="cuda", requires_grad=True)
    (x @ x).sum().backward()  # the backward pass multiplies on a thread of its own
    assert torch.cuda.memory_allocated() > before + 2**20
    x = None
    release("cuda")
    assert torch.cuda.memory_allocated() <= before
