"""Attention: sweeps over implementations, lengths, head widths, dtypes and phases (SPEC 6.4)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.cases.case import Case, Check, Prepared, Work
from benchmarks.cases.registries import ruler_module
from benchmarks.measure.clock import cold_l2, kernel_clock

AREA = "attention"
PHASES = ("forward", "backward", "forward_backward")
ROWS = {row.name: row for row in ruler_module("attention/registry.py").ATTENTION}
# Correctness is checked once for each implementation, dtype, head width and options, at no more than this length.
CHECK_LENGTH = 256
# tiled launches some 16 kernels for each pair of tiles of 64 rows: about 0.2 s a call here, at any speed of the device,
# and four times that at twice the length, an hour for the row of 65,536. Longer cells are rows that say so.
LONGEST_TILED = 4096


def case(
    target: str,
    phase: str,
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    queries: int,
    keys: int | None = None,
    head_dim: int,
    dtype: str = "bf16",
    causal: bool = True,
    window: int | None = None,
    tier: str = "standard",
) -> Case:
    """One attention case; unset keys and key/value heads equal the queries and query heads."""
    shape: dict[str, Any] = {
        "B": batch,
        "N": heads,
        "K": kv_heads or heads,
        "S": queries,
        "T": keys or queries,
        "H": head_dim,
    }
    if window is not None:
        shape["window"] = window
    shape["mask"] = "causal" if causal else "full"
    return Case(
        area=AREA, target=target, phase=phase, shape=shape, dtype=dtype, tier=tier, peer=ROWS[target].peer
    )  # fmt: skip


def _each(phases: Iterable[str] = PHASES, dtypes: Iterable[str] = ("bf16",), **shape: Any) -> list[Case]:
    """A case for every implementation that has the dtype and every phase that it can run."""
    return [
        case(row.name, phase, dtype=dtype, **shape)
        for row in ROWS.values()
        for dtype in dtypes
        if dtype in row.dtypes
        for phase in phases
        if row.backward or phase == "forward"
    ]


def _asked(length: int) -> list[dict[str, Any]]:
    """What models ask of 16 query heads besides: shared key/value heads, a window, no mask, a chunk of queries after a
    prefix, and queries from elsewhere."""
    return [
        {"queries": length, "kv_heads": 2},
        {"queries": length, "kv_heads": 1},
        {"queries": length, "window": length // 16},
        {"queries": length, "causal": False},
        {"queries": length // 16, "keys": length},
        {"queries": length // 16, "keys": length, "causal": False},
    ]


def cases() -> list[Case]:
    """Every attention case, smallest tier first; a case named by two sweeps appears once."""
    found: list[Case] = []
    # What two CPU cores do in seconds; also a check that every implementation runs at all.
    for length in (256, 1024):
        found += _each(dtypes=("fp32",), heads=4, queries=length, head_dim=64, tier="smoke")
    # (c) headline
    for width in (64, 128):
        found += _each(heads=16, queries=16384, head_dim=width, tier="standard")
    found += _each(dtypes=("fp32", "tf32"), heads=16, queries=4096, head_dim=64, tier="standard")
    for shape in _asked(16384):
        found += _each(heads=16, head_dim=128, tier="standard", **shape)
    for shape in _asked(256):  # on a CPU one row of ours and one peer
        found += [
            case(target, "forward_backward", dtype="fp32", heads=16, head_dim=64, tier="smoke", **shape)
            for target in ("tiled", "sdpa")
        ]
    # (a) the attention module without heads
    for width in (16, 32, 64, 128):
        for length in (256, 1024, 4096, 8192, 16384):
            found += [
                case(target, phase, batch=8, queries=length, head_dim=width, dtype="fp32", causal=True, tier="full")
                for target in ROWS
                if target.startswith("reference")
                for phase in ("forward", "backward")
            ]  # fmt: skip
    # (b) flash: lengths and widths
    for dtype in ("bf16", "fp32", "tf32"):
        for width in (16, 32, 64, 128):
            for exponent in range(7, 17):
                found += _each(dtypes=(dtype,), queries=2**exponent, head_dim=width, tier="full")
    return list({one.id: one for one in found}.values())


def _inputs(shape: dict[str, Any], dtype: Any, device: str, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """q [B,N,S,H], k and v [B,K,T,H] that require gradients, and an upstream gradient like q; seeded normals."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(heads: int, length: int) -> Any:
        return torch.randn(shape["B"], heads, length, shape["H"], device=device, generator=generator).to(
            dtype
        )

    q, k, v = normal(shape["N"], shape["S"]), normal(shape["K"], shape["T"]), normal(shape["K"], shape["T"])
    upstream = normal(shape["N"], shape["S"])
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), upstream


def runs_here(target: str, device: str) -> None:
    """Raises NotImplementedError, with the reason, where the implementation cannot run."""
    row = ROWS[target]
    _function(
        target, device, next(iter(row.cuda_dtypes or row.dtypes) if device == "cuda" else iter(row.dtypes))
    )


def _function(
    target: str, device: str, dtype: str = "fp32", head_dim: int | None = None, **wanted: bool
) -> Callable[..., Any]:
    """The implementation, or NotImplementedError with the reason why it cannot do what is wanted here."""
    import torch

    row = ROWS[target]
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    reason = row.refusal(device=device, dtype=dtype, capability=capability, head_dim=head_dim, **wanted)
    if reason is not None:
        raise NotImplementedError(reason)
    if row.compiles:
        torch.compiler.reset()  # a cell compiles afresh: after eight shapes torch.compile runs eager code or fails
    return ruler_module("attention/registry.py").load_attention(row)


def _options(shape: dict[str, Any]) -> dict[str, Any]:
    return {"causal": shape["mask"] == "causal", "window": shape.get("window")}


@contextmanager
def _products(dtype: str) -> Iterator[None]:
    """Matrix products of float32 as the row says: rounded to TF32 in a tf32 row, IEEE float32 in any other."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def prepare(one: Case, device: str) -> Prepared:
    """Make inputs and the callable of one phase.

    backward times the backward pass alone, over a graph that is kept; gradient buffers are dropped before each
    repetition, so that every backward writes fresh ones as the first of a training step does.
    """
    products = ExitStack()
    products.enter_context(_products(one.dtype))
    try:
        return replace(_prepare(one, device), close=products.close)
    except BaseException:
        products.close()
        raise


def _prepare(one: Case, device: str) -> Prepared:
    import torch

    from trainstep.specs.dtype import get_dtype

    shape, spec = dict(one.shape), get_dtype(one.dtype)
    if one.target == "tiled" and shape["S"] > LONGEST_TILED:
        raise NotImplementedError(
            f"tiled launches its kernels tile by tile: not timed beyond {LONGEST_TILED} queries"
        )
    dtype = getattr(torch, spec.torch_name)
    function = _function(
        one.target,
        device,
        one.dtype,
        shape["H"],
        grouped_query=shape["K"] < shape["N"],
        window="window" in shape,
        backward=one.phase != "forward",
    )
    options = _options(shape)
    q, k, v, upstream = _inputs(shape, dtype, device)
    metrics = None

    if one.phase == "forward":
        with torch.no_grad():
            detached = [tensor.detach() for tensor in (q, k, v)]

        def run() -> None:
            with torch.no_grad():
                function(*detached, **options)

    elif one.phase == "backward":
        import torch._functorch.config

        # torch.compile's backward may write into what forward saved, or take such code out of its cache on disk, where
        # forward_backward left it; it then refuses to keep the graph. This is the switch that its refusal names.
        with torch._functorch.config.patch(donated_buffer=False):
            output = function(q, k, v, **options)
        if device == "cuda":
            held = torch.cuda.memory_allocated()
            metrics = lambda: {"memory_before_backward": {"value": held, "unit": "byte", "better": "lower"}}  # noqa: E731

        def run() -> None:
            torch.autograd.grad(output, (q, k, v), upstream, retain_graph=True)

    else:

        def run() -> None:
            torch.autograd.grad(function(q, k, v, **options), (q, k, v), upstream)

    flops = ruler_module("accounting/flops.py").attention_flops
    return Prepared(
        run=run,
        clock=kernel_clock(device),
        before=cold_l2(device),  # made after the memory in use was read: it is none of the case's
        work=Work(
            flops=flops(
                batch=shape["B"],
                heads=shape["N"],
                queries=shape["S"],
                keys=shape["T"],
                head_dim=shape["H"],
                causal=options["causal"],
                window=options["window"],
                phase=one.phase,
            )
        ),
        check=lambda: check(one.target, one.dtype, device, one.phase != "forward", **_short(shape)),
        metrics=metrics,
    )  # fmt: skip


def _short(shape: dict[str, Any]) -> dict[str, Any]:
    """The shape that is checked for a case: its options at a length that float64 can afford.

    Two key/value heads with their query heads, one where the case has one; a window that still hides something;
    fewer queries than keys, or more, where they differ.
    """
    longest = CHECK_LENGTH - 3  # no multiple of any tile
    kv_heads = 1 if shape["K"] == 1 < shape["N"] else 2
    window, fewer = shape.get("window"), longest // 4
    return {
        "B": 1,
        "N": kv_heads * (shape["N"] // shape["K"]),
        "K": kv_heads,
        "S": fewer if shape["S"] < shape["T"] else longest,
        "T": fewer if shape["T"] < shape["S"] else longest,
        "H": shape["H"],
        "mask": shape["mask"],
        "window": None if window is None else min(window, fewer),
    }


@cache
def check(target: str, dtype_name: str, device: str, gradients: bool, **shape: Any) -> Check:
    """Compare outputs (and gradients where wanted) with the reference in float64, for a shape that `_short` gave.

    The error returned is the largest share of its budget over all compared tensors, so its budget is 1.
    """
    import torch

    from benchmarks.measure.error_budget import (
        GRADIENT_FACTOR,
        OUTPUT_FACTOR,
        attention_terms,
        budget,
        largest_error,
        largest_share,
    )
    from trainstep.specs.dtype import get_dtype

    dtype = getattr(torch, get_dtype(dtype_name).torch_name)
    q, k, v, upstream = _inputs(shape, dtype, device, seed=1)
    reference = ruler_module("attention/registry.py").load_attention(ROWS["reference"])

    def results(function: Callable[..., Any], cast: Any) -> list[Any]:
        inputs = [tensor.detach().to(cast).requires_grad_() for tensor in (q, k, v)]
        output = function(*inputs, **_options(shape))
        if not gradients:
            return [output.detach()]
        return [output.detach(), *torch.autograd.grad(output, inputs, upstream.to(cast))]

    with _products(dtype_name):
        exact = results(reference, torch.float64)
        plain = results(reference, dtype)
        ours = results(_function(target, device, dtype_name), dtype)
    queries, keys = shape["S"], shape["T"]
    place = torch.arange(keys - queries, keys, device=device)  # of queries: the last one sees the last key
    distance = place[:, None] - torch.arange(keys, device=device)[None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if shape["mask"] == "causal":
        seen = (distance >= 0) & (distance < (shape["window"] or keys))
    terms = attention_terms(q, k, v, upstream, seen=seen, scale=shape["H"] ** -0.5)
    shares = []
    for index, (got, near, truth) in enumerate(zip(ours, plain, exact, strict=True)):
        allowed = budget(near, truth, GRADIENT_FACTOR if index else OUTPUT_FACTOR, terms[index])
        shares.append(largest_error(got, truth) / allowed)
    return largest_share(shares)
