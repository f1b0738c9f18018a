"""The Hopper kernels: what they refuse, what they compile to, and on the chip itself what they compute.

Compiling needs no GPU, so that what makes these kernels fast is guarded everywhere: matrix products that stay
asynchronous, and no register spilled. Numbers need compute capability 9.0.
"""

import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.measure.error_budget import GRADIENT_FACTOR, OUTPUT_FACTOR, budget, compare
from tests.attention.addresses import stored_offsets
from trainstep.attention.contract import Problem
from trainstep.attention.hopper import function
from trainstep.attention.registry import get_attention
from trainstep.interpreter import interpreted

TESTED = triton.__version__ in function.TRITON and importlib.util.find_spec("triton.experimental.gluon")
needs_tested_triton = pytest.mark.skipif(
    not TESTED,
    reason=f"the kernels are for Triton {', '.join(function.TRITON)}, this is {triton.__version__}",
)
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != function.CAPABILITY,
    reason="needs a GPU of compute capability 9.0",
)


def problem(device: str = "cuda", width: int = 64, window: int | None = None) -> Problem:
    q: Any = SimpleNamespace(device=torch.device(device), shape=(1, 1, 8, width))
    return Problem(q, q, q, True, window, 1.0, 0, False)


@pytest.mark.parametrize(
    ("call", "capability", "version", "words"),
    [
        (problem("cpu"), (9, 0), "3.6.0", "CUDA tensors, got cpu"),
        (problem(), (8, 0), "3.6.0", "compute capability 9.0, got 8.0"),
        (problem(), (10, 0), "3.6.0", "compute capability 9.0, got 10.0"),
        (problem(), (9, 0), "3.5.1", "Triton 3.6.0, got 3.5.1"),
        (problem(width=96), (9, 0), "3.6.0", "head widths 64, 128, got 96"),
        (problem(window=4), (9, 0), "3.6.0", "no window"),
    ],
)
def test_refusal_names_the_reason(
    monkeypatch: pytest.MonkeyPatch, call: Problem, capability: tuple[int, int], version: str, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", version)
    reason = function.refusal(call)
    assert reason is not None and words in reason


def test_taken_when_all_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert function.refusal(problem(width=128)) is None


def test_public_function_refuses_with_value_error() -> None:
    x = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="CUDA tensors"):
        function.attention(x, x, x)
    with pytest.raises(ValueError, match=r"got torch\.float32"):
        function.attention(x.float(), x.float(), x.float())


def test_fake_operators_give_shapes_and_dtypes() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 4, 7, 64, dtype=torch.float16)
        k = torch.empty(2, 2, 9, 64, dtype=torch.float16)
        out, lse = function.hopper_attention_forward(q, k, k, True, 1.0, 2)
        dq, dk, dv = function.hopper_attention_backward(q, k, k, out, lse, out, None, True, 1.0, 2)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    assert lse.shape == (2, 4, 7) and lse.dtype == torch.float32
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape and dk.dtype == k.dtype


@needs_tested_triton
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "offset", "expected"),
    [(4, 9, False, 0, 9), (4, 9, True, 5, 9), (4, 9, True, 0, 4), (9, 4, True, -5, 4), (2, 4, True, -3, 0)],
)
def test_keys_past_the_last_visible_one(
    queries: int, keys: int, causal: bool, offset: int, expected: int
) -> None:
    from trainstep.attention.hopper import launch

    assert launch._visible_keys(queries, keys, causal, offset) == expected


@needs_tested_triton
def test_only_what_a_tensor_map_cannot_read_is_copied() -> None:
    from trainstep.attention.hopper import launch

    x = torch.zeros(2, 16, 4, 64, dtype=torch.bfloat16)
    for readable in (x, x.transpose(1, 2), x[:, 1:, ::2], x[:1].expand(1, 16, 4, 64)):
        assert launch._loadable(readable) is readable
    wide = torch.zeros(2, 4, 16, 68, dtype=torch.bfloat16)
    every_other = torch.zeros(2, 4, 16, 128, dtype=torch.bfloat16)[..., ::2]
    for unreadable in (
        every_other,
        wide[..., :64],
        wide[..., 4:],
        x.transpose(2, 3),
        x[:1].expand(2, 16, 4, 64),
    ):
        copy = launch._loadable(unreadable)
        assert copy is not unreadable and copy.is_contiguous() and torch.equal(copy, unreadable)


@needs_tested_triton
@pytest.mark.skipif(not interpreted(), reason="runs in Triton's interpreter; the GPU tests cover the kernel")
@pytest.mark.parametrize("with_d_lse", [False, True])
def test_statistics_kernel_against_its_formula(with_d_lse: bool) -> None:
    from trainstep.attention.hopper import launch

    batch, heads, queries, width, padded = 1, 2, 70, 64, 128
    torch.manual_seed(0)
    out = torch.randn(batch, heads, queries, width)
    d_out = torch.randn(batch, queries, heads, width).transpose(1, 2)
    lse = torch.randn(batch, heads, queries)
    lse[0, 1, 3] = -math.inf
    d_lse = torch.randn_like(lse)
    lse2, delta = torch.full((2, heads, padded), math.nan)
    programs = heads * padded // 64
    counters = torch.full((programs + 2,), 7, dtype=torch.int32)
    launch.statistics_kernel[(programs,)](
        out, d_out, lse, d_lse if with_d_lse else lse, lse2, delta, counters, d_out.stride(), heads, queries, padded,
        H=width, ROWS=64, HAS_D_LSE=with_d_lse,
    )  # fmt: skip
    expected = (out * d_out).sum(3)[0] - (d_lse[0] if with_d_lse else 0.0)
    torch.testing.assert_close(delta[:, :queries], expected, rtol=1e-5, atol=1e-5)
    expected = (lse[0] / math.log(2.0)).masked_fill(lse[0] == -math.inf, math.inf)
    torch.testing.assert_close(lse2[:, :queries], expected)
    assert bool((lse2[:, queries:] == math.inf).all()) and bool((delta[:, queries:] == 0.0).all())
    assert counters.tolist() == [0] * (programs + 1) + [7]


def compile_both(width: int) -> None:
    """Compile the shipped kernels for sm_90a and print what tests look at: a line a kernel."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from trainstep.attention.hopper import launch

    x = torch.zeros(1, 2, 256, width, dtype=torch.bfloat16)
    rows, number = torch.zeros(2, 256), torch.zeros(8, dtype=torch.int32)
    ahead, back = launch.FORWARD[width], launch.BACKWARD[width]
    maps = {name: launch._tile_map(x, back.queries) for name in ("q_desc", "do_desc")}
    maps |= {name: launch._tile_map(x, back.keys) for name in ("k_desc", "v_desc", "dk_desc", "dv_desc")}
    maps |= {name: launch._row_map(rows, back.queries) for name in ("lse2_desc", "delta_desc")}
    tensors = {"lse": rows, "dq_sum": rows, "counters": number, "arrivals": number}
    shared = {"H": width, "CAUSAL": True, "DTYPE": gl.bfloat16}
    for kernel, warps, arguments, constants in (
        (
            launch.forward_kernel,
            4,
            {"q_desc": launch._tile_map(x, 64), "o_desc": launch._tile_map(x, 64)},
            {"KEYS": ahead.keys, "STAGES": ahead.stages, "CONSUMERS": ahead.consumers,
             "TAKE_TURNS": ahead.take_turns},
        ),
        (
            launch.backward_kernel,
            8,
            {},
            {"QUERIES": back.queries, "KEYS": back.keys, "Q_STAGES": back.q_stages,
             "DO_STAGES": back.do_stages},
        ),
    ):  # fmt: skip
        constants = constants | shared
        values = tensors | maps | arguments
        signature: dict[str, str] = {}
        attributes = {}
        for index, name in enumerate(kernel.arg_names):
            if name in constants:
                signature[name] = "constexpr"
                continue
            value = values.get(name, 0.125 if name.startswith("scale") else 1024)
            signature[name], hint = native_specialize_impl(BaseBackend, value, False, True, True)
            if hint:
                attributes[(index,)] = BaseBackend.parse_attr(hint)
        source = GluonASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        with tempfile.TemporaryDirectory() as folder:
            ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
            ptx.write_text(compiled.asm["ptx"])
            cubin.write_bytes(compiled.asm["cubin"])
            report = subprocess.run(
                [tools / "ptxas", "-v", "-arch=sm_90a", ptx, "-o", "/dev/null"],
                capture_output=True,
                text=True,
            )
            sass = subprocess.run(
                [tools / "cuobjdump", "-sass", cubin], capture_output=True, text=True
            ).stdout
        print(
            kernel.__name__,
            f"products={len(re.findall('HGMMA', sass))}",
            f"spills={len(re.findall(r'(?:LDL|STL)', sass))}",
            f"serialised={len(re.findall('serialized', report.stderr + report.stdout))}",
            f"shared_bytes={compiled.metadata.shared}",
        )


@needs_tested_triton
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler tools are for Linux")
@pytest.mark.parametrize("width", function.WIDTHS)
def test_compiles_to_asynchronous_products_without_spills(width: int) -> None:
    # Its own process: in the interpreter's, Triton does not compile.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, __file__, str(width)], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [
        line for line in done.stdout.splitlines() if line.startswith(("forward_kernel", "backward_kernel"))
    ]
    assert len(lines) == 2, done.stdout
    for line in lines:
        facts = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", line)}
        assert facts["products"] >= 36, line
        assert facts["spills"] == facts["serialised"] == 0, line
        assert facts["shared_bytes"] <= 232_448, line  # a block's largest share on this chip


def finish_dq_ir(width: int) -> str:
    """Triton's IR of the kernel that scales and stores dQ, without a mask."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from trainstep.attention.hopper import launch

    kernel = launch.finish_dq_kernel
    constants = {"QUERIES": launch.BACKWARD[width].queries, "H": width, "CAUSAL": False}
    signature = dict.fromkeys(constants, "constexpr") | {"dq_sum": "*fp32", "dq": "*bf16", "scale": "fp32"}
    signature = {name: signature.get(name, "i32") for name in kernel.arg_names}
    source = GluonASTSource(kernel, signature, constants, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ttgir"]


@needs_tested_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler tools are for Linux")
@pytest.mark.parametrize("width", function.WIDTHS)
def test_dq_past_two_to_the_31_elements_of_one_head(width: int) -> None:
    # 8 GiB of queries; the last tile is only partly inside.
    queries, tile = 2**32 // width + 5, 128 if width == 64 else 64
    row_tiles = queries // tile + 1
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = f"import sys; from {__name__} import finish_dq_ir; print(finish_dq_ir({width}))"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for head, row_tile in ((0, 0), (1, 3), (0, row_tiles - 1), (3, row_tiles - 1)):
        offsets = stored_offsets(
            done.stdout,
            program=head * row_tiles + row_tile,
            query_length=queries,
            row_tiles=row_tiles,
            offset=0,
        )
        row = row_tile * tile + np.arange(tile)[:, None]
        assert np.array_equal(offsets, (head * queries + row) * width + np.arange(width))


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int) -> tuple[Tensor, Tensor]:
    """The formula with materialised scores, in the inputs' dtype; a row without keys gives 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(2, 3)) / math.sqrt(q.shape[3])
    if causal:
        query = torch.arange(q.shape[2], device=q.device)[:, None]
        key = torch.arange(k.shape[2], device=q.device)[None, :]
        scores = scores.masked_fill(key > query + offset, -math.inf)
    lse = torch.logsumexp(scores.double(), 3)
    empty = (lse == -math.inf)[..., None]
    p = torch.exp(scores - lse[..., None].masked_fill(empty, 0.0).to(scores.dtype)).masked_fill(empty, 0.0)
    return p @ v, lse


LENGTHS = [
    (1, 1),
    (7, 1),
    (1, 7),
    (16, 17),
    (129, 40),
    (40, 300),
    (128, 128),
    (300, 300),
    (129, 517),
    (517, 129),
]


@needs_hopper
@needs_tested_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", function.WIDTHS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (3, 1)])
def test_numbers(dtype: torch.dtype, width: int, heads: int, kv_heads: int) -> None:
    """Outputs, lse, gradients within the error budget, from poisoned buffers; two runs agree to the bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with NaN
    try:
        for (queries, keys), (causal, alignment) in product(
            LENGTHS, [(False, "bottom-right"), (True, "bottom-right"), (True, "top-left")]
        ):
            torch.manual_seed(queries + keys)

            def random(n: int, length: int) -> Tensor:
                x = torch.randn(2, length, n, width, device="cuda").to(dtype)
                return x.transpose(1, 2)

            q, k, v = random(heads, queries), random(kv_heads, keys), random(kv_heads, keys)
            d_out = random(heads, queries)
            d_lse = torch.randn(2, heads, queries, device="cuda")
            offset = keys - queries if alignment == "bottom-right" else 0

            def results(run: Any, to: torch.dtype) -> list[Tensor]:
                leaves = [x.to(to).detach().requires_grad_() for x in (q, k, v)]  # noqa: B023
                out, lse = run(*leaves)
                finite = lse.masked_fill(lse == -math.inf, 0.0)
                upstream = [d_out.to(out.dtype), d_lse.to(lse.dtype)]  # noqa: B023
                return [out, lse, *torch.autograd.grad([out, finite], leaves, upstream)]

            def ours(*x: Tensor) -> Any:
                return function.attention(*x, causal=causal, alignment=alignment, return_lse=True)  # noqa: B023

            def formula(*x: Tensor) -> Any:
                return dense(*x, causal, offset)  # noqa: B023

            exact, plain = results(formula, torch.float64), results(formula, dtype)
            first, second = results(ours, dtype), results(ours, dtype)
            for name, actual, again, e, p in zip(
                ("out", "lse", "dq", "dk", "dv"), first, second, exact, plain, strict=True
            ):
                assert torch.equal(actual, again), name
                factor = OUTPUT_FACTOR if name in ("out", "lse") else GRADIENT_FACTOR
                terms = float(e.masked_fill(e == -math.inf, 0.0).abs().max()) + keys
                check = compare(actual, e, budget(p, e, factor, terms))
                assert check.error <= check.budget, (name, queries, keys, causal, alignment, check)
    finally:
        torch.use_deterministic_algorithms(False)


@needs_hopper
@needs_tested_triton
@pytest.mark.gpu
def test_keys_that_no_row_sees_change_nothing() -> None:
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for n in (40, 300, 300))
    results = []
    for hidden in (0.0, math.nan):
        k[:, :, 40:], v[:, :, 40:] = hidden, hidden
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function.attention(*leaves, causal=True, alignment="top-left")
        assert isinstance(out, Tensor)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for clean, hidden_nan in zip(*results, strict=True):
        assert torch.equal(clean, hidden_nan)
    assert bool((results[1][2][:, :, 40:] == 0).all())


def bad_row_results(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, alignment: str = "bottom-right"
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of a causal call."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = function.attention(*leaves, causal=True, alignment=alignment, return_lse=True)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, d_out)


@needs_hopper
@needs_tested_triton
@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("width", function.WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bad_key_or_value_reaches_only_the_rows_that_see_it(
    dtype: torch.dtype, width: int, value: float
) -> None:
    """Rows before the bad key come out as if it were not there, bit by bit; rows that see it are not finite."""
    for queries, keys, alignment in (
        (700, 700, "bottom-right"),
        (300, 517, "bottom-right"),
        (300, 400, "top-left"),
    ):
        torch.manual_seed(keys)
        q, d_out = (torch.randn(2, 4, queries, width, device="cuda", dtype=dtype) for _ in range(2))
        k, v = (torch.randn(2, 2, keys, width, device="cuda", dtype=dtype) for _ in range(2))
        offset = keys - queries if alignment == "bottom-right" else 0
        clean = bad_row_results(q, k, v, d_out, alignment)
        for place in (1, 63, 64, 127, 128, 190, 191, 192, 255, 256, keys - 2, keys - 1):
            unaware = min(max(place - offset, 0), queries)  # rows that do not see the key
            for which in ("key", "value", "element"):
                bad_k, bad_v = k.clone(), v.clone()
                if which == "key":
                    bad_k[1, 1, place] = value
                elif which == "value":
                    bad_v[1, 1, place] = value
                else:
                    bad_v[1, 1, place, width - 1] = value
                out, lse, dq, dk, dv = bad_row_results(q, bad_k, bad_v, d_out, alignment)
                said = (queries, keys, place, which)
                for name, before, after in zip(("out", "lse", "dq"), clean, (out, lse, dq), strict=False):
                    assert torch.equal(before[0], after[0]), (name, said)
                    assert torch.equal(before[1, :2], after[1, :2]), (name, said)  # heads of the other keys
                    assert torch.equal(before[1, 2:, :unaware], after[1, 2:, :unaware]), (name, said)
                for name, before, after in zip(("dk", "dv"), clean[3:], (dk, dv), strict=True):
                    assert torch.equal(before[0], after[0]) and torch.equal(before[1, 0], after[1, 0]), (
                        name,
                        said,
                    )
                if unaware == queries:
                    for before, after in zip(clean[3:], (dk, dv), strict=True):
                        assert torch.equal(before, after), said
                    continue
                aware = slice(unaware, queries)
                if which != "key":
                    assert torch.equal(clean[1], lse), said
                    assert torch.equal(clean[4], dv), said  # dV = P^T dO knows no values
                    assert bool((~torch.isfinite(out[1, 2:, aware, width - 1])).all()), said
                    assert bool((~torch.isfinite(dq[1, 2:, aware])).any(-1).all()), said
                elif math.isnan(value):
                    assert bool(out[1, 2:, aware].isnan().all()) and bool(lse[1, 2:, aware].isnan().all()), (
                        said
                    )
                    assert bool(dq[1, 2:, aware].isnan().all()), said


@needs_hopper
@needs_tested_triton
@pytest.mark.gpu
def test_compiles_into_one_graph_and_refuses_double_backward() -> None:
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q.requires_grad_()

    def run(q: Tensor) -> Tensor:
        return function.attention(q, k, v, causal=True).float().square().sum()  # type: ignore[union-attr]

    (eager,) = torch.autograd.grad(run(q), q)
    (compiled,) = torch.autograd.grad(torch.compile(run, fullgraph=True)(q), q)
    torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)
    (first,) = torch.autograd.grad(run(q), q, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"double backward|autograd"):
        torch.autograd.grad(first.float().sum(), q)


def test_the_registry_row_says_what_the_function_takes():
    row = get_attention("hopper")
    assert row.triton_versions == function.TRITON
    can = {
        "device": "cuda",
        "dtype": "bf16",
        "capability": (9, 0),
        "backward": True,
        "lse": True,
        "grouped_query": True,
    }
    if triton.__version__ in function.TRITON:
        assert row.refusal(**can, head_dim=64) is None
    assert "64, 128, not 80" in row.refusal(**can, head_dim=80)
    assert "window" in row.refusal(**can, head_dim=64, window=True)


if __name__ == "__main__":
    compile_both(int(sys.argv[1]))
