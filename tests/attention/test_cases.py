"""The attention cases of the ruler: TF32 only where a row says so, compiled code made afresh, what is not timed."""

import pytest
import torch

from benchmarks.cases import attention as table
from benchmarks.measure.sampling import Policy
from benchmarks.runner import measure


@pytest.fixture(autouse=True)
def _precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("dtype", "expected"), [("tf32", "high"), ("fp32", "highest"), ("bf16", "highest")])
def test_float32_products_are_as_the_row_says(monkeypatch, dtype, expected):
    # Whatever was set before: a tf32 row that multiplies IEEE float32 lies, and so does the opposite.
    seen = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def noting(*args, **options):
        seen.append(torch.get_float32_matmul_precision())
        return plain(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    table.check.cache_clear()
    case = table.case("sdpa", "forward_backward", queries=16, head_dim=16, dtype=dtype)
    torch.set_float32_matmul_precision("medium")
    outcome = measure(case, "cpu", Policy(warmup=1, min_samples=1, max_samples=1))
    assert outcome.status == "ok", outcome.reason
    assert len(seen) >= 3 and set(seen) == {expected}  # check, warm-up, sample
    assert torch.get_float32_matmul_precision() == "medium"


def test_precision_is_put_back_when_a_case_cannot_be_prepared():
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(NotImplementedError, match="does not run on cpu"):
        table.prepare(table.case("triton-tf32", "forward", queries=16, head_dim=16, dtype="tf32"), "cpu")
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("name", [row.name for row in table.ROWS.values() if row.compiles])
def test_compiled_code_is_made_afresh_for_each_cell(monkeypatch, name):
    # After eight shapes torch.compile refuses a ninth, or runs it eagerly.
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    table._function(name, "cuda", "bf16")
    assert resets == [name]


def test_everything_that_compiles_says_so():
    assert {row.name for row in table.ROWS.values() if row.compiles} == {"reference-compiled", "flex"}
    assert all(row.compiles for row in table.ROWS.values() if row.options.get("compile"))


def test_tiled_is_a_row_with_a_reason_where_a_call_takes_seconds():
    outcome = measure(table.case("tiled", "forward", queries=16384, head_dim=64), "cpu", Policy())
    assert outcome.status == "skipped"
    assert outcome.reason == "tiled launches its kernels tile by tile: not timed beyond 4096 queries"


def test_gradients_are_checked_once_for_both_phases_that_have_them():
    table.check.cache_clear()
    for phase in table.PHASES:
        prepared = table.prepare(table.case("sdpa", phase, queries=16, head_dim=16, dtype="fp32"), "cpu")
        assert prepared.check().green
        prepared.close()
    assert table.check.cache_info().misses == 2  # without gradients, and with


def test_a_graph_that_is_kept_gives_no_buffer_away(monkeypatch):
    # Compiled code that wrote into what was saved for backward refuses to run backward twice.
    import torch._functorch.config as config

    seen = []

    def function(q, k, v, **options):
        seen.append(config.donated_buffer)
        return q * k * v

    monkeypatch.setattr(table, "_function", lambda *arguments, **wanted: function)
    for phase in ("backward", "forward_backward"):
        prepared = table.prepare(table.case("sdpa", phase, queries=16, head_dim=16, dtype="fp32"), "cpu")
        prepared.run()
        prepared.close()
    assert seen == [False, True]


def test_what_models_ask_besides_is_measured():
    asked = {
        (c.shape["K"], c.shape["S"], c.shape["mask"], c.shape.get("window"))
        for c in table.cases()
        if c.target == "triton" and c.tier == "standard" and c.shape["T"] == 16384 and c.shape["H"] == 128
    }
    assert asked >= {
        (2, 16384, "causal", None),
        (1, 16384, "causal", None),
        (16, 16384, "causal", 1024),
        (16, 16384, "full", None),
        (16, 1024, "causal", None),
        (16, 1024, "full", None),
    }


@pytest.mark.parametrize(
    "shape", [{"queries": 16, "keys": 64}, {"window": 4}, {"causal": False}, {"kv_heads": 1}]
)
def test_the_check_of_a_case_has_its_options(shape, monkeypatch):
    one = table.case(
        "tiled", "forward_backward", dtype="fp32", heads=4, head_dim=16, **{"queries": 64, **shape}
    )
    assert table.prepare(one, "cpu").check().green
    right = table._function

    def wrong(target, *arguments, **needs):
        function = right(target, *arguments, **needs)
        if target != "tiled":
            return function

        def other(q, k, v, **options):
            if shape == {"kv_heads": 1}:  # each query head the next one's
                q = q.roll(1, 1)
            elif "window" in shape:
                options["window"] += 1
            else:  # top-left alignment, or a mask where there is none
                options |= {"causal": True, "alignment": "top-left"}
            return function(q, k, v, **options)

        return other

    monkeypatch.setattr(table, "_function", wrong)
    table.check.cache_clear()
    assert not table.prepare(one, "cpu").check().green
    table.check.cache_clear()
