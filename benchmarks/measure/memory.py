"""Peak memory by phase, memory really released between cells, and what an out-of-memory error says."""

import errno
import gc
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_AMOUNT = r"([\d.]+) (bytes|B|KiB|MiB|GiB|TiB)"
_ASKED = re.compile(rf"[Tt]ried to allocate {_AMOUNT}")
_FREE = re.compile(rf"of which {_AMOUNT} is free")


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """What the allocator said when it gave up; None where the message does not say it.

    The message rounds to two decimals of its unit, so bytes are exact only up to that.
    """

    asked_bytes: int | None
    free_bytes: int | None


class HostMemoryError(MemoryError):
    """The host has not the memory that is needed, found out before any of it was taken."""

    def __init__(self, asked_bytes: int, free_bytes: int) -> None:
        super().__init__(asked_bytes, free_bytes)
        self.asked_bytes, self.free_bytes = asked_bytes, free_bytes


# As CUDA, HIP, Triton, NCCL, the libraries and the allocators say it, and an exception's name before its message.
_OUT_OF_MEMORY = re.compile(
    r"\b(?:CUDA|HIP|XPU|MPS backend) out of memory"
    r"|\b[Ee]rror(?: \[\w+\])?: out of memory"
    r"|\bfailure (?:\d+ )?'out of memory'"
    r"|_ERROR_OUT_OF_MEMORY\b|_STATUS_ALLOC_FAILED\b"
    r"|can't allocate memory|[Cc]annot allocate memory \(12\)"
    r"|\b(?:OutOfMemoryError|(?:Host)?MemoryError)(?=[:(]|$)",
)
_WHILE_HANDLED = "During handling of the above exception, another exception occurred:"


def _says_so(text: str) -> bool:
    """Whether a RuntimeError's text tells of memory that ran out.

    A rank's failure carries its traceback: of that count the lines of exceptions, which are not indented as lines of
    code are, and only those that led to the last one.
    """
    last = text.rpartition(_WHILE_HANDLED)[2]
    return any(_OUT_OF_MEMORY.search(line) for line in last.splitlines() if not line.startswith(" "))


def _memory_error(error: BaseException) -> BaseException | None:
    """The error that says that memory ran out: this one, or one that it was raised from; the innermost, which knows
    the amounts."""
    import torch

    found: BaseException | None = None
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in seen:
        if (
            isinstance(one, torch.OutOfMemoryError | MemoryError)
            or (isinstance(one, OSError) and one.errno == errno.ENOMEM)
            or (isinstance(one, RuntimeError) and _says_so(str(one)))
        ):
            found = one
        seen.append(one)
        one = one.__cause__
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: the error itself, what it was raised from, or what a rank reported.

    An error that was raised while another one was handled, without `from`, is an error of its own.
    """
    return _memory_error(error) is not None


def read_out_of_memory(error: BaseException) -> OutOfMemory:
    """Take the amounts out of an error that `is_out_of_memory`, or out of the one that it was raised from."""
    error = _memory_error(error) or error
    if isinstance(error, HostMemoryError):
        return OutOfMemory(asked_bytes=error.asked_bytes, free_bytes=error.free_bytes)
    text = str(error)

    def amount(pattern: re.Pattern[str]) -> int | None:
        found = pattern.search(text)
        return None if found is None else round(float(found[1]) * _UNITS[found[2]])

    return OutOfMemory(asked_bytes=amount(_ASKED), free_bytes=amount(_FREE))


def describe_out_of_memory(error: BaseException) -> str:
    """One line: bytes asked for and bytes free, or the message's first line where it gives no amounts."""
    error = _memory_error(error) or error
    read = read_out_of_memory(error)
    if read.asked_bytes is None:
        lines = str(error).strip().splitlines()
        return f"out of memory: {lines[0]}" if lines else "out of memory"
    free = "unknown" if read.free_bytes is None else f"{read.free_bytes} bytes ({size_text(read.free_bytes)})"
    where = " of the host" if isinstance(error, HostMemoryError) else ""
    asked = f"{read.asked_bytes} bytes ({size_text(read.asked_bytes)})"
    return f"out of memory{where}: asked for {asked}, free: {free}"


def size_text(size_bytes: float) -> str:
    """Bytes in the largest unit of 1024 that keeps the number at 1 or above: "2.00 GiB", "512 B"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size_bytes) >= _UNITS[unit]:
            return f"{size_bytes / _UNITS[unit]:.2f} {unit}"
    return f"{size_bytes:.0f} B"


# Left to the kernel and to other programs.
_HOST_RESERVE = 0.1


def available_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What this process may still take of the host's memory; None where the system does not say.

    The least of what the kernel calls available and what every control group around the process leaves, file
    cache that can be dropped included, less a tenth for others. A program that takes more is killed, pinned
    memory cannot even be swapped.
    """
    found = []
    with suppress(OSError):
        meminfo = (proc / "meminfo").read_text()
        found += [int(kib) * 1024 for kib in re.findall(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)]
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                found += _left_by_groups(cgroups, path, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes"
                found += _left_by_groups(cgroups / "memory", path, *names)
    return max(0, int(min(found) * (1 - _HOST_RESERVE))) if found else None


def _left_by_groups(root: Path, path: str, limit: str, usage: str) -> list[int]:
    """Bytes left in a control group and in each group around it that has a limit.

    Inside a container the path may be the host's, which is not mounted: then the root's own files speak.
    """
    left = []
    inner = root / path.lstrip("/")
    for group in (inner, *inner.parents):
        with suppress(OSError, ValueError):  # no such group, no limit on it, or "max"
            room = int((group / limit).read_text()) - int((group / usage).read_text())
            left.append(room)
            stat = (group / "memory.stat").read_text()
            cache = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
            left[-1] += int(cache[1]) if cache else 0
        if group == root:
            break
    return left


def release(device: str) -> None:
    """Give memory back between cells: collect reference cycles, then empty the allocators' caches."""
    gc.unfreeze()  # what `release_cell` set aside
    gc.collect()
    if device == "cuda":
        _empty_caches()


def _empty_caches() -> None:
    import torch

    torch.cuda.synchronize()
    # 32 MiB a thread and stream that multiplied on a Hopper: a later cell's memory in use must not show them.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    # Pinned blocks too; the public name is younger than torch 2.10.
    (getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache)()
    torch.cuda.reset_peak_memory_stats()


# Bytes left on the device by the last full collection, and how many more may be left before there is another one.
_surviving_bytes: int | None = None
_SLACK_BYTES = 2**20


def release_cell(device: str) -> None:
    """As `release`, for thousands of short cells on a GPU: looks only at what the last cell made.

    A collection walks every object there is, 0.1 s with torch alone and 0.2 to 0.4 s once its compiler was used: twice
    a cell, more than most cells take to be measured. So what survives one is set aside until device memory is left
    over. On a CPU this is `release`.
    """
    global _surviving_bytes
    if device != "cuda":
        release(device)
        return
    import torch

    gc.collect()
    _empty_caches()
    if _surviving_bytes is None or torch.cuda.memory_allocated() > _surviving_bytes + _SLACK_BYTES:
        release(device)
        _surviving_bytes = torch.cuda.memory_allocated()
    gc.freeze()


class PeakMeter:
    """Peak bytes of each phase of a step.

    On CUDA the caching allocator's own figures, which include libraries' workspaces; on a CPU the bytes of
    tensors counted as operations make them (`trainstep.memory.live`), which a compiled region hides.

    Attributes:
        start_bytes: allocated before the first phase: parameters, gradients, optimizer state, inputs.
        peaks_bytes: phase name -> most bytes in use while it ran, the start included.
    """

    def __init__(self, device: str, resident: tuple[Any, ...] = ()) -> None:
        """`resident`: tensors alive already; only a CPU needs to be told."""
        self.device = device
        self.peaks_bytes: dict[str, int] = {}
        self._resident = resident
        self._live: Any = None
        self.start_bytes = 0

    def __enter__(self) -> "PeakMeter":
        import torch

        self._stack = ExitStack()
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.start_bytes = torch.cuda.memory_allocated()
        else:
            from trainstep.memory.live import LiveBytes

            storages = {tensor.untyped_storage()._cdata: tensor for tensor in self._resident}
            self.start_bytes = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
            self._live = self._stack.enter_context(LiveBytes())
            self._live.ignore(*storages.values())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase; phases do not nest. A phase measured twice keeps the larger peak."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._live.reset_peak()
        yield
        if self.device == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = self.start_bytes + self._live.peak_bytes
        self.peaks_bytes[name] = max(peak, self.peaks_bytes.get(name, 0))

    @property
    def peak_bytes(self) -> int:
        """The highest phase."""
        return max(self.peaks_bytes.values(), default=self.start_bytes)
