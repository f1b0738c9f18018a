"""Made-up rows of every area and status, on two machines, with a history that contains a regression."""

import random
from typing import Any

from benchmarks.measure.record import STUDY, Row
from benchmarks.report.trends import Commit

CPU_ENV = {
    "device": "cpu",
    "cpu": "Some Processor 8160",
    "cpu_count": 2,
    "torch": "2.13.0",
    "triton": "3.6.0",
    "python": "3.11.2",
}
GPU_ENV = {"device": "cuda", "gpu": "NVIDIA H200", "driver": "570.124", "cuda": "12.9", "torch": "2.11.0",
           "triton": "3.6.0", "python": "3.12.3"}  # fmt: skip
EVIL_GPU = "<script>alert('gpu')</script>\"&"
EVIL_SUBJECT = "</script><script>document.title='owned'</script> & $x$ | `y` #z"
COMMITS = [
    Commit(sha=f"{index:x}" * 40, subject=subject)
    for index, subject in enumerate(
        [
            "Lay out",
            "Add attention",
            EVIL_SUBJECT,
            "Tune tiles",
            "Mask keys in a loop",
            "Rename",
            "Docs",
            "Speed up",
        ]
    )
]
PEERS = {"sdpa-flash", "flex", "torch", "torch-ddp", "best-parts", "plain"}


def is_peer(area: str, target: str) -> bool:
    """As the case tables would say it."""
    return target in PEERS


def row(
    case: str, seconds: float | None = None, *, samples: int = 10, noise: float = 0.01, **fields: Any
) -> Row:
    """One row; with seconds, its samples scatter about them reproducibly."""
    draw = random.Random(f"{case} {fields.get('commit')} {fields.get('env')}")
    taken = (
        tuple(seconds * (1 + noise * draw.random()) for _ in range(samples)) if seconds is not None else ()
    )
    given: dict[str, Any] = {
        "case": case, "version": 1, "suite": "run", "run": "run-1", "machine": "cpu-2core",
        "commit": COMMITS[-1].sha, "dirty": False, "source_sha256": "s" * 64, "ruler_sha256": "r" * 64,
        "started_at": "2026-11-29T12:00:00+00:00", "status": "ok", "samples_seconds": taken, "env": CPU_ENV,
    }  # fmt: skip
    return Row(**(given | fields))


def work(**values: float) -> dict[str, dict[str, Any]]:
    """Metrics without a direction."""
    return {name: {"value": value, "unit": name, "better": None} for name, value in values.items()}


def _seconds(name: str, values: list[float], better: str = "lower") -> dict[str, Any]:
    return {
        name: {
            "value": sorted(values)[len(values) // 2],
            "unit": "second",
            "better": better,
            "samples": values,
        }
    }


def attention_rows() -> list[Row]:
    """A sweep with one cell out of memory, one skipped, one red, one single sample and one time of zero."""
    rows = []
    speed = {"reference": 40e12, "tiled": 25e12, "triton": 420e12, "sdpa-flash": 380e12, "flex": 300e12}
    for phase, factor in (("forward", 4.0), ("forward_backward", 14.0)):
        for length in (512, 1024, 4096, 16384):
            for target, rate in speed.items():
                case = (
                    f"attention/{target}/{phase}/B1,N16,K16,S{length},T{length},H64,bf16,causal,w1".replace(
                        "bf16,causal", "causal,bf16"
                    )
                )
                flops = factor * 16 * length * length * 64 / 2
                common: dict[str, Any] = {"machine": "gpu-h200", "env": GPU_ENV}
                if target == "reference" and length == 16384:
                    rows.append(row(case, status="oom", reason="asked for 8.00 GiB, 1.20 GiB free", **common))
                    continue
                if target == "flex" and length == 512:
                    rows.append(row(case, status="skipped", reason="no kernel below 1024", **common))
                    continue
                if target == "tiled" and length == 4096:
                    rows.append(row(case, status="red", reason="differs from the reference",
                                    metrics=work(flops=flops), check={"error": 3.0, "budget": 1.0},
                                    **common))  # fmt: skip
                    continue
                seconds = flops / rate * (1 + 2000 / length)
                samples = 1 if (target, length) == ("triton", 512) else 20
                rows.append(row(case, seconds, samples=samples, metrics=work(flops=flops),
                                check={"error": 0.4, "budget": 1.0}, **common))  # fmt: skip
    rows.append(
        row("attention/triton/backward/B1,N4,K4,S64,T64,H64,causal,fp32,w1", 0.0, metrics=work(flops=1e6))
    )
    return rows


def cpu_rows() -> list[Row]:
    """Steps, collectives and data parallelism on a CPU, one of each without a result."""
    rows = []
    for target, seconds in (("plain", 0.090), ("best-parts", 0.080), ("ours", 0.050)):
        parts = {"forward": 0.3, "backward": 0.5, "optimizer": 0.2}
        metrics = work(flops=2e9, tokens=512) | {
            "peak_memory": {"value": 3.2e8, "unit": "byte", "better": "lower"}
        }
        for name, share in parts.items():
            metrics |= _seconds(name, [seconds * share * (1 + 0.01 * i) for i in range(5)])
        rows.append(
            row(f"step/{target}/train_step/toy,B4,S128,fp32,w1", seconds, metrics=metrics, first_seconds=1.5)
        )
    rows.append(
        row("step/plain/train_step/xl,B4,S512,fp32,w1", status="error", reason="RuntimeError: a | b\nc")
    )
    for ranks in (2, 4):
        for size in (10**6, 10**7, 10**8):
            for target, rate in (("torch", 3e9), ("ring", 2e9)):
                case = f"collective/{target}/all_reduce/bytes{size},fp32,w{ranks}"
                if (target, ranks, size) == ("ring", 4, 10**8):
                    rows.append(row(case, status="error", reason="rank 1: TimeoutError: no answer in 60 s"))
                    continue
                sent = 2 * (ranks - 1) / ranks * size
                env = CPU_ENV | {"world_size": ranks}
                rows.append(row(case, size / rate * ranks / 2 + 3e-4, metrics=work(bytes_sent=sent), env=env))
    for target, seconds, hidden in (("naive", 0.065, 0.0), ("flat", 0.06, 0.0), ("overlapped", 0.052, 0.7),
                                    ("bucketed", 0.050, 0.8), ("torch-ddp", 0.051, None)):  # fmt: skip
        metrics = _seconds("communication", [0.012, 0.011, 0.013])
        if hidden is not None:
            metrics |= {"hidden_share": {"value": hidden, "unit": "ratio", "better": "higher"}}
        rows.append(row(f"data_parallel/{target}/train_step/toy,B4,S128,fp32,w2", seconds, metrics=metrics))
    return rows


def memory_rows() -> list[Row]:
    """Checkpointing policies with predicted and measured peaks; one without a prediction, one failed."""
    rows = []
    for target, group, peak, predicted in (
        ("none", "", 4000, 3900),
        ("every", "", 900, 1000),
        ("group", "group4,", 700, None),
    ):
        sizes = {"peak_memory": peak * 2.0**20} | (
            {"predicted_peak": predicted * 2.0**20} if predicted else {}
        )
        metrics = work(flops=1e9, tokens=512) | {
            name: {"value": size, "unit": "byte", "better": "lower"} for name, size in sizes.items()
        }
        if target == "none":
            metrics["active_memory"] = {"value": 4000 * 2.0**20, "unit": "byte", "better": None,
                                        "seconds": [0.0, 0.01, 0.02], "samples": [2**30, 4000 * 2**20, 2**30],
                                        "phases": [[0.0, "forward"], [0.015, "backward"]]}  # fmt: skip
        rows.append(row(f"memory/{target}/train_step/toy,B4,S128,{group}fp32,w1", 0.05, metrics=metrics))
    return [
        *rows,
        row("memory/offload/train_step/toy,B4,S128,fp32,w1", status="error", reason="RuntimeError: no"),
    ]


FULL_NAME = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
    "(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)"
)
SHORT_NAME = "vectorized_elementwise_kernel<FillFunctor, float>"


def study_rows() -> list[Row]:
    """Two profiled steps with more kernels than the page shows, one that did not fit, and what autocast does."""
    common: dict[str, Any] = {"suite": STUDY, "run": "profile-1", "machine": "gpu-h200", "env": GPU_ENV}
    rows = []
    for length in (128, 512):
        metrics = {}
        for phase in ("forward", "backward", "optimizer"):
            names = [FULL_NAME, *(f"sm80_xmma_gemm_f32_tilesize64x{i}x8" for i in range(9))]
            kernels = [
                {"name": name, "kind": "matmul" if number else "other", "calls": 10 + number,
                 "seconds": (length if number else 3 * length) * 1e-6, "share": (1 if number else 3) / 12}
                for number, name in enumerate(names)
            ]  # fmt: skip
            metrics[phase] = {"value": 12e-6 * length, "unit": "s", "better": None, "kernels": kernels}
        split = {"softmax_seconds": 4e-4, "matmul_seconds": 1e-4, "other_seconds": 1e-5}
        metrics["softmax_to_matmul"] = {"value": 4.0, "unit": "1", "better": None, **split}
        said = [f"forward: the kernel with most time is {SHORT_NAME} (other)", "<i>literally</i>"]
        metrics["answers"] = {"value": 2, "unit": "1", "better": None, "said": said}
        rows.append(row(f"profile/plain/train_step/toy,B4,S{length},fp32,w1", metrics=metrics, **common))
    rows.append(
        row("profile/plain/train_step/xl,B4,S512,fp32,w1", status="oom", reason="asked for 9 GiB", **common)
    )
    sums = {"float16 += float16": {"value": 9.953125, "unit": "1", "better": None, "lesson": "rounded"}}
    rows.append(row("precision/accumulation/sum/mixed,w1", metrics=sums, **common))
    for dtype, name in (("fp16", "float16"), ("bf16", "bfloat16")):
        tensors = [
            {"what": "output", "of": "fc1", "dtype": name},
            {"what": "loss", "of": "", "dtype": "float32"},
        ]
        found = {"dtypes": {"value": 2, "unit": "1", "better": None, "tensors": tensors}}
        rows.append(row(f"precision/autocast/forward_backward/fc1-ln,{dtype},w1", metrics=found, **common))
    return rows


REGRESSED = "attention/reference/forward/B1,N4,K4,S256,T256,H64,causal,fp32,w1"
STEADY = "attention/tiled/forward/B1,N4,K4,S256,T256,H64,causal,fp32,w1"


def history_rows(slow: float = 1.15) -> list[Row]:
    """Two cases over eight commits in five processes each.

    One slows down at the fifth; the third commit has no result, the sixth fails; for the other case torch
    changes at the seventh.
    """
    rows = []
    for index, commit in enumerate(COMMITS):
        if index == 2:
            continue
        # Dates run backwards: the order is the topology's.
        common: dict[str, Any] = {"commit": commit.sha, "run": f"history-{index}"}
        common["started_at"] = f"2026-10-{28 - index:02}T00:00:00+00:00"
        for process in range(5):
            env = CPU_ENV | {"process": process}
            if index == 5:
                rows.append(
                    row(REGRESSED, status="error", reason="ImportError: no module", env=env, **common)
                )
            else:
                rows.append(
                    row(REGRESSED, 0.010 * (slow if index >= 4 else 1), noise=0.003, env=env, **common)
                )
            env = env | ({"torch": "2.14.0"} if index >= 6 else {})
            rows.append(row(STEADY, 0.006, noise=0.01, env=env, **common))
    return rows


FINDINGS = [{"case": REGRESSED, "commits": [COMMITS[4].sha], "ratio": 1.15}]


def all_rows() -> list[Row]:
    """Everything above, and one row whose device name tries to be markup."""
    evil = row("attention/tiled/forward/B2,N1,K1,S64,T64,H8,full,fp32,w1", 0.001, machine="evil<b>",
               env=GPU_ENV | {"gpu": EVIL_GPU})  # fmt: skip
    return [*history_rows(), *attention_rows(), *cpu_rows(), *memory_rows(), *study_rows(), evil]
