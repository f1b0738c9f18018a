"""Where a measurement comes from: hashes of the measured source and of the ruler, commit, environment.

The hashes need no git, so that rows measured where git does not travel can be filed later under the commit
whose trees hash equal (`benchmarks.adopt`). No host names and no paths are recorded.
"""

import hashlib
import io
import os
import platform
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.measure.record import Row

SOURCE, RULER = "src", "benchmarks"
# Left out of the hashes: what tools leave in a checkout, and git ignores.
_IGNORED_PARTS = {"__pycache__", "build", "dist"}
_IGNORED_ENDINGS = ("~", ".pyc", ".pyo", ".so", ".o", ".egg-info", ".orig", ".rej", ".swp")


def _counts(path: PurePosixPath) -> bool:
    return not any(
        part in _IGNORED_PARTS or part.startswith(".") or part.endswith(_IGNORED_ENDINGS)
        for part in path.parts
    )


def _digest(files: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256 over paths and contents in path order, each after its length so that none joins the next."""
    total = hashlib.sha256()
    for path, content in sorted(files):
        for part in (path.encode("utf-8", "surrogateescape"), content):
            total.update(len(part).to_bytes(8, "big") + part)
    return total.hexdigest()


def tree_sha256(directory: Path) -> str:
    """Hash of a directory's source files: relative paths and bytes; equal for a checkout and an unpacked
    archive.

    Raises:
        ValueError: there is no such directory.
    """
    if not directory.is_dir():
        raise ValueError(f"no directory {directory} to hash")

    def files() -> Iterator[tuple[str, bytes]]:
        for folder, subfolders, names in os.walk(directory):
            here = Path(folder).relative_to(directory)
            subfolders[:] = [s for s in subfolders if _counts(PurePosixPath(s))]
            for name in names:
                relative, path = PurePosixPath(here.as_posix()) / name, Path(folder) / name
                if _counts(relative) and not path.is_symlink() and path.is_file():
                    yield str(relative), path.read_bytes()

    return _digest(files())


def git(root: Path, *arguments: str, stdin: bytes | None = None) -> bytes:
    """What git answers in `root`.

    Raises:
        ValueError: git is not there or refuses; its own last line.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], input=stdin, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise ValueError("git is not installed") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"git {arguments[0]}: {lines[-1] if lines else 'failed'}")
    return done.stdout


@cache
def committed_tree_sha256(root: Path, tree: str) -> str:
    """`tree_sha256` of a git tree object, as a checkout of it would hash."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(git(root, "archive", "--format=tar", tree))) as archive:
        for member in archive:
            if member.isfile() and _counts(PurePosixPath(member.name)):
                content = archive.extractfile(member)
                assert content is not None
                files[member.name] = content.read()
    return _digest(files.items())


def tree_id(root: Path, commit: str, directory: str) -> str | None:
    """Git's id of a commit's directory, None when the commit has no such directory."""
    try:
        return git(root, "rev-parse", "--verify", "--quiet", f"{commit}:{directory}").decode().strip()
    except ValueError:
        return None


def head_commit(root: Path) -> str | None:
    """The commit checked out in `root`; None unless `root` is the top of a git work tree."""
    try:
        top = git(root, "rev-parse", "--show-toplevel").decode().strip()
        if Path(top).resolve() != root.resolve():
            return None
        return git(root, "rev-parse", "--verify", "HEAD").decode().strip()
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The fields of a Row that say what was measured with what; see `record.Row`."""

    commit: str | None
    dirty: bool
    source_sha256: str
    ruler_sha256: str

    def template(self, *, suite: str, run: str, machine: str, env: dict[str, Any]) -> Row:
        """What all rows of a run have in common; each replaces the rest."""
        return Row(
            case="",
            version=1,
            suite=suite,
            run=run,
            machine=machine,
            commit=self.commit,
            dirty=self.dirty,
            source_sha256=self.source_sha256,
            ruler_sha256=self.ruler_sha256,
            started_at="",
            status="ok",
            env=env,
        )


def provenance(root: Path, *, source: Path | None = None, commit: str | None = None) -> Provenance:
    """Where rows measured in the checkout `root` come from.

    `dirty` is decided by the same hashes that `adopt` uses: the measured source (or, unless another commit's
    source is measured, the ruler) hashes otherwise than the commit's. Without a commit it is False: nothing
    to differ from.

    Args:
        root: the ruler's checkout.
        source: another tree `src/` to measure; then `commit` is the commit it is said to be of.
        commit: see `source`; the checked-out commit when absent.

    Raises:
        ValueError: a tree is not there, or git does not know `commit`.
    """
    source_sha256 = tree_sha256(source or root / SOURCE)
    ruler_sha256 = tree_sha256(root / RULER)
    head = head_commit(root)
    dirty = False
    if commit is not None and head is not None:
        try:
            commit = git(root, "rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
        except ValueError:
            raise ValueError(f"git knows no commit {commit!r}") from None
    measured = commit or (head if source is None else None)
    if measured is not None and head is not None:
        pairs = [(SOURCE, source_sha256)]
        if commit is None:
            pairs.append((RULER, ruler_sha256))
        for directory, found in pairs:
            tree = tree_id(root, measured, directory)
            dirty |= tree is None or committed_tree_sha256(root, tree) != found
    return Provenance(commit=measured, dirty=dirty, source_sha256=source_sha256, ruler_sha256=ruler_sha256)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's model as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def host_mark() -> str:
    """Twelve digits that tell hosts apart, and one boot of a host from the next; no name and no place.

    A hash of the boot's id, the processor's model and the size of memory.
    """
    parts = [cpu_name()]
    try:
        parts.append(str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    except (OSError, ValueError, AttributeError):  # not Linux
        pass
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def environment(device: str) -> dict[str, Any]:
    """What a result on `device` ("cpu" or "cuda") depends on; the caller adds `world_size`.

    Keys: device, host, os, arch, python, cpu, cpu_count, cpu_threads, torch, triton, asv, asv_runner,
    pytest_benchmark; on CUDA also gpu, gpu_count, capability, cuda, cudnn, driver, clocks (MHz as found: sm,
    memory, their maxima; power limit in W). What is not there is None.
    """
    import torch

    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    env: dict[str, Any] = {
        "device": device,
        "host": host_mark(),
        # The first two numbers: what follows them in a release is the builder's own.
        "os": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "arch": platform.machine(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_count": cores,
        "cpu_threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "asv": _version("asv"),
        "asv_runner": _version("asv_runner"),
        "pytest_benchmark": _version("pytest-benchmark"),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        env |= {
            "gpu": properties.name,
            "gpu_count": torch.cuda.device_count(),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **_nvidia_smi(str(getattr(properties, "uuid", ""))),
        }
    return env


_CLOCKS = {
    "clocks.sm": "sm",
    "clocks.mem": "memory",
    "clocks.max.sm": "sm_max",
    "clocks.max.mem": "memory_max",
    "power.limit": "power_limit_watts",
}


def _nvidia_smi(uuid: str) -> dict[str, Any]:
    """Driver and clocks of one GPU as nvidia-smi tells them, None where it does not."""
    fields = ["driver_version", *_CLOCKS]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if uuid:
        command += ["-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        driver, *values = (v.strip() for v in answer.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, IndexError):
        return {"driver": None, "clocks": None}

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:  # "[N/A]"
            return None

    return {"driver": driver, "clocks": dict(zip(_CLOCKS.values(), map(number, values), strict=False))}
