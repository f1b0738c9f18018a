"""Profiles: kernels found in traces, tables, shares, answers, overlap, and nothing left switched on."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.cases.registries import ROOT
from benchmarks.cases.step import ROWS, Step
from benchmarks.measure import nsys as nsys_module
from benchmarks.measure.nsys import find_nsys, nsys_command
from benchmarks.measure.overlap import Overlap, draw, intersection, overlap_of, union
from benchmarks.measure.profile import (
    answers,
    attention_flops,
    attention_ranges,
    attention_split,
    kernel_table,
    measured_range,
    profile_parts,
    ranges_on,
    shares,
)
from benchmarks.measure.trace import kernels_of, kind_of, load_trace
from trainstep import ranges
from trainstep.specs.model import get_model


def event(cat, name, start, duration, thread=1, **arguments):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": arguments,
    }


def launched(number, name, launch, start, duration, *, thread=1, stream=7, cat="kernel"):
    """A kernel and the call that launched it."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", launch, 1, thread, correlation=number),
        event(cat, name, start, duration, thread=stream, correlation=number, stream=stream),
    ]


def cuda_trace():
    """Forward with attention on the main thread, backward launched by autograd's thread, all kernels running
    late."""
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {}},
            event("user_annotation", "forward", 0, 100),
            event("user_annotation", "attention", 20, 50),
            event("user_annotation", "backward", 100, 100),
            event("user_annotation", "nccl:all_reduce", 100, 100),
            event("cpu_op", "aten::linear", 1, 15),
            event("cpu_op", "aten::mm", 2, 10),
            *launched(1, "sm90_xmma_gemm_f32", 5, 1000, 40),
            event("cpu_op", "aten::bmm", 21, 5),
            *launched(2, "nvjet_tst_128x256", 22, 1040, 10),
            event("cpu_op", "aten::_softmax", 30, 5),
            *launched(3, "cunn_SoftMaxForward", 31, 1050, 30),
            event("cpu_op", "aten::masked_fill", 40, 5),
            *launched(4, "elementwise_kernel", 41, 1080, 20),
            event("cpu_op", "aten::mul", 80, 5),
            *launched(5, "elementwise_kernel", 81, 1100, 0.5),
            event("cpu_op", "aten::mm", 110, 10, thread=2),
            *launched(6, "sm90_xmma_gemm_f32", 111, 1200, 80, thread=2),
            *launched(7, "ncclDevKernel_AllReduce_Sum_f32", 150, 1240, 60, thread=2, stream=9),
            *launched(8, "Memcpy DtoD (Device -> Device)", 160, 1285, 20, cat="gpu_memcpy"),
            event("kernel", "orphan", 1400, 1, stream=7),
        ]
    }


def test_kernels_belong_where_they_were_launched():
    kernels = {kernel.name: kernel for kernel in kernels_of(cuda_trace()) if kernel.start_us != 1200}
    product = kernels["sm90_xmma_gemm_f32"]
    assert (product.phase, product.operation, product.ranges, product.kind) == (
        "forward",
        "aten::mm",
        ("forward",),
        "matmul",
    )
    assert product.lane == "stream 7"
    assert kernels["cunn_SoftMaxForward"].ranges == ("forward", "attention")
    backward = next(kernel for kernel in kernels_of(cuda_trace()) if kernel.start_us == 1200)
    assert (backward.phase, backward.operation, backward.ranges) == ("backward", "aten::mm", ())
    assert kernels["ncclDevKernel_AllReduce_Sum_f32"].kind == "communication"
    assert kernels["Memcpy DtoD (Device -> Device)"].kind == "copy"
    assert kernels["orphan"].phase == ""


@pytest.mark.parametrize(
    ("name", "operation", "kind"),
    [
        ("nvjet_hsh_128x256_64x4", "aten::mm", "matmul"),
        ("triton_tem_fused_mm_3", "", "matmul"),
        ("triton_poi_fused_mul_3", "", "other"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", "", "attention"),
        ("fmha_cutlassF_f32_aligned", "aten::_efficient_attention_forward", "attention"),
        ("_attention_forward_kernel", "trainstep::attention", "attention"),
        ("ncclKernel_AllGather_RING_LL", "", "communication"),
        ("Memset (Device)", "", "copy"),
        ("vectorized_elementwise_kernel", "aten::add", "other"),
        ("splitKreduce_kernel", "aten::addmm", "matmul"),
    ],
)
def test_kinds(name, operation, kind):
    assert kind_of(name, operation) == kind


def test_table_shares_and_split():
    kernels = kernels_of(cuda_trace())
    table = kernel_table(kernels, "forward")
    assert [(line.name, line.calls) for line in table] == [
        ("sm90_xmma_gemm_f32", 1),
        ("cunn_SoftMaxForward", 1),
        ("elementwise_kernel", 2),
        ("nvjet_tst_128x256", 1),
    ]
    assert table[0].seconds == 40e-6
    assert sum(line.share for line in table) == pytest.approx(1)
    assert shares(kernels, ["forward"]) == pytest.approx({"matmul": 50 / 100.5, "other": 50.5 / 100.5})
    assert shares(kernels, ["optimizer"]) == {}
    split = attention_split(kernels)
    assert (split.softmax_seconds, split.matmul_seconds, split.other_seconds) == (30e-6, 10e-6, 20e-6)


def test_ranges_inside_attention_name_what_kernels_do_not():
    trace = {
        "traceEvents": [
            event("user_annotation", "forward", 0, 100),
            event("user_annotation", "attention softmax", 20, 10),
            event("user_annotation", "attention scores", 40, 10),
            *launched(1, "elementwise_kernel", 25, 100, 10),
            *launched(2, "nvjet_tst_128x256", 45, 110, 5),
            *launched(3, "nvjet_tst_128x256", 60, 120, 5),
        ]
    }
    split = attention_split(kernels_of(trace))
    assert (split.softmax_seconds, split.matmul_seconds, split.other_seconds) == (10e-6, 5e-6, 0)


def test_answers_come_from_the_data():
    config = get_model("toy", context_length=16)
    said = "\n".join(answers(kernels_of(cuda_trace()), config))
    assert "forward: the kernel with most time is sm90_xmma_gemm_f32 (matmul): 39.8%" in said
    assert "one forward calls it 1 times" in said
    assert "matrix products take 49.8% of the time in forward and " in said
    assert "forward, besides products: most time takes cunn_SoftMaxForward (29.9%, 1 calls)" in said
    assert "a ratio of 3.00" in said
    softmax, products = attention_flops(config)
    assert (softmax, products) == (5 * 2 * 4 * 4 * 256, 4 * 2 * 4 * 4 * 256 * 16)


def test_answers_name_kernels_so_that_one_can_read_them():
    long = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)"
    trace = {"traceEvents": [event("user_annotation", "forward", 0, 9), *launched(1, long, 1, 5, 2)]}
    said = "\n".join(answers(kernels_of(trace)))
    assert "vectorized_elementwise_kernel<FillFunctor, float>" in said and "std::array" not in said


def test_fused_attention_is_said_to_be_fused():
    trace = {
        "traceEvents": [
            event("user_annotation", "forward", 0, 100),
            event("user_annotation", "attention", 20, 50),
            *launched(1, "flash_fwd_kernel", 30, 100, 10),
        ]
    }
    assert "cannot be told apart" in "\n".join(answers(kernels_of(trace)))
    assert not attention_split(kernels_of(trace)).seen


def test_no_kernels_no_answers():
    assert answers([]) == []
    assert kernel_table([]) == []


def test_a_real_step_on_a_cpu(tmp_path):
    config = get_model("toy", context_length=32)
    step = Step(ROWS["plain"], config, "fp32", "cpu")
    with attention_ranges(step.model):
        kernels = profile_parts(
            step.parts("train_step"),
            tmp_path / "traces" / "toy.json",
            device="cpu",
            before=step.reset_gradients,
        )
    table = {line.name: line.calls for line in kernel_table(kernels, "forward")}
    assert table["aten::mm"] == 2 * 7 + 1  # seven projections a block, and the head
    assert {kernel.phase for kernel in kernels} >= {"forward", "backward", "optimizer"}
    assert attention_split(kernels).seen
    # A kernel's own time: an operation and the ones that it calls are not counted twice.
    trace = load_trace(tmp_path / "traces" / "toy.json")
    (forward,) = [
        e for e in trace["traceEvents"] if e.get("name") == "forward" and e.get("cat") == "user_annotation"
    ]
    assert 0 < sum(kernel.duration_us for kernel in kernels if kernel.phase == "forward") <= forward["dur"]
    assert len(answers(kernels, config, "cpu")) >= 6
    assert all(not hasattr(block.attention.attend, "__wrapped__") for block in step.model.blocks)


def test_nothing_stays_switched_on_after_an_exception(tmp_path):
    def broken():
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        profile_parts([("forward", broken)], tmp_path / "t.json", device="cpu", warmup=0)
    assert not ranges.is_enabled()
    assert not torch.autograd._profiler_enabled()
    assert list(tmp_path.iterdir()) == []

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = broken

    model = Attention()
    with pytest.raises(RuntimeError, match="stop"), attention_ranges(model):
        model.attend()
    assert model.attend is broken


def test_ranges_that_were_on_stay_on():
    ranges.enable()
    try:
        with ranges_on():
            pass
        assert ranges.is_enabled()
    finally:
        ranges.disable()


def test_measured_range_brackets_for_nsys(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    with pytest.raises(RuntimeError, match="inside"), measured_range("cuda"):
        raise RuntimeError("inside")
    assert calls == ["start", "wait", "stop"]
    with measured_range("cpu"):
        pass
    assert len(calls) == 3


def test_nsys_command(tmp_path):
    command = nsys_command(["python", "-m", "benchmarks", "profile", "xl"], tmp_path / "xl.nsys-rep")
    assert command[:2] == ["nsys", "profile"]
    assert "--trace=cuda,cublas,cudnn,osrt,nvtx" in command
    assert "--pytorch=autograd-shapes-nvtx" in command
    assert "--capture-range=cudaProfilerApi" in command
    assert f"--output={tmp_path / 'xl'}" in command
    assert command[-5:] == ["python", "-m", "benchmarks", "profile", "xl"]
    with pytest.raises(ValueError, match="needs a command"):
        nsys_command([], tmp_path / "x")


def test_missing_nsys_is_said_clearly(monkeypatch):
    monkeypatch.setattr(nsys_module.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"nsys is not installed.*torch\.profiler"):
        find_nsys()
    monkeypatch.setattr(nsys_module.shutil, "which", lambda name: f"/opt/{name}")
    assert find_nsys() == "/opt/nsys"


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"traceEvents": 3}', "{"])
def test_other_files_are_no_traces(tmp_path, content):
    file = tmp_path / "t.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="is not a Chrome trace"):
        load_trace(file)
    with pytest.raises(ValueError, match="cannot read"):
        load_trace(tmp_path / "missing.json")


def test_intervals():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (9, 9), (7, 6)]) == ((0, 4), (5, 6))
    assert union([]) == ()
    assert intersection([(0, 4), (5, 9)], [(3, 6), (8, 20)]) == ((3, 4), (5, 6), (8, 9))
    assert intersection([], [(0, 1)]) == ()


@pytest.mark.parametrize(
    ("computation", "communication", "share"),
    [
        ([(0, 100)], [(20, 60)], 1.0),
        ([(0, 20)], [(20, 60)], 0.0),
        ([(0, 30), (50, 70)], [(20, 60)], 0.5),
        ([(0, 10)], [], None),
    ],
)
def test_hidden_share(computation, communication, share):
    lanes = Overlap(computation=union(computation), communication=union(communication))
    assert lanes.hidden_share == share
    assert lanes.communication_seconds == sum(end - start for start, end in communication) / 1e6


def test_overlap_of_a_device_trace():
    """All-reduce from 1240 to 1300: products run until 1280, and the copy from 1285 on computes nothing."""
    assert overlap_of(cuda_trace()).hidden_share == pytest.approx(40 / 60)


def test_overlap_of_a_cpu_trace():
    trace = {
        "traceEvents": [
            event("cpu_op", "c10d::allreduce_", 0, 5),
            event("user_annotation", "gloo:all_reduce", 10, 40, thread=2),
            event("cpu_op", "aten::matmul", 20, 20),
            event("cpu_op", "aten::mm", 21, 18),
        ]
    }
    lanes = overlap_of(trace)
    assert lanes.computation == ((20, 40),)
    assert lanes.hidden_share == 0.5
    assert overlap_of({"traceEvents": []}).hidden_share is None


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture_of_both_lanes(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, an extra of the ruler")
    file = tmp_path / f"lanes.{suffix}"
    draw(overlap_of(cuda_trace()), file)
    assert file.stat().st_size > 1000
    if suffix == "svg":
        assert "67% of communication hidden" in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_traces_are_read_compressed_or_not(tmp_path):
    text = json.dumps(cuda_trace()).encode()
    for content in (text, gzip.compress(text)):
        file = tmp_path / "t.json"
        file.write_bytes(content)
        assert load_trace(file) == cuda_trace()


# Without the time in gzip's header, which would be in the tests' names: two workers must collect the same ones.
@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"\xff", gzip.compress(b"{}", mtime=0), gzip.compress(b"x" * 99, mtime=0)[:-9]],
)
def test_what_is_no_trace_is_named(tmp_path, content):
    file = tmp_path / "t.json.gz"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.json\.gz is not a Chrome trace"):
        load_trace(file)


def test_the_profiler_says_nothing_of_itself(tmp_path):
    """In a process of its own: its library reads once how much it may say."""
    code = (
        "from pathlib import Path; from benchmarks.measure.profile import profile_parts; "
        f"profile_parts([('forward', lambda: None)], Path({str(tmp_path / 't.json')!r}), device='cpu')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_a_gpu_without_kernels_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(RuntimeError, match="saw no kernels"):
        profile_parts([("forward", lambda: torch.ones(3).sum())], tmp_path / "t.json", device="cuda")


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(self, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    with pytest.raises(OSError, match="No space left"):
        profile_parts([("forward", lambda: None)], tmp_path / "t.json.gz", device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_ranges_that_are_off_allocate_nothing():
    assert ranges.annotate("one") is ranges.annotate("another")
