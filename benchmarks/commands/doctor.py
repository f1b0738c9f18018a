"""`doctor`: what this machine can run, and why not the rest."""

import shutil
from collections.abc import Callable
from functools import partial


def doctor() -> int:
    """Versions, devices and tools, then for each row of each area whether it runs here or the reason why not."""
    import pandas

    from benchmarks.cases import AREAS
    from benchmarks.commands.measuring import choose_device, source_tree
    from benchmarks.commands.printing import print_frame
    from benchmarks.measure.provenance import environment

    device = choose_device("auto")
    with source_tree(None):
        facts = environment(device)
        print_frame(
            "This machine", pandas.DataFrame([{"what": k, "is": str(v)} for k, v in facts.items() if v])
        )
        print_frame(
            "Tools", pandas.DataFrame([{"tool": t, "answer": answer} for t, answer in _tools().items()])
        )
        lines = []
        for area, module in AREAS.items():
            for target in module.ROWS:
                answer = _answer(partial(module.runs_here, target, device))
                lines.append({"area": area, "target": target, "on " + device: answer})
        print_frame("Rows", pandas.DataFrame(lines))
    return 0


def _answer(probe: Callable[[], None]) -> str:
    try:
        probe()
    except Exception as reason:
        return f"no: {str(reason).splitlines()[0] if str(reason) else type(reason).__name__}"
    return "yes"


def _tools() -> dict[str, str]:
    def importable(module: str) -> str:
        import importlib.util

        return "yes" if importlib.util.find_spec(module) else "no: not installed"

    def program(name: str, use: str) -> str:
        return "yes" if shutil.which(name) else f"no: {name} is not on the PATH ({use})"

    return {
        "triton": importable("triton"),
        "asv": importable("asv"),
        "pytest-benchmark": importable("pytest_benchmark"),
        "C++ compiler": program("g++", "compiled rows on a CPU need it"),
        "nsys": program("nsys", "optional; torch.profiler answers without it"),
        "git": program("git", "records need it to know their commit"),
    }
