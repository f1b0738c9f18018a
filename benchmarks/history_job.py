"""asv over the last commits of this checkout, with everything it leaves in git-ignored places.

`asv run` itself uses asv.conf.json as it stands, builds every commit into an environment of its own and publishes
under results/asv. This is for whoever wants to see within a minute what the last commits did to the numbers on
the machine at hand: each commit's src/ is unpacked beside the checkout and measured by the running Python.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.cases.registries import ROOT
from benchmarks.commands.measuring import choose_device
from benchmarks.measure.alternate import unpack_source
from benchmarks.measure.foreign import stamp_asv
from benchmarks.measure.provenance import environment, git
from benchmarks.measure.record import write_atomically

LOCAL = ROOT / "results" / "local"
SITE = ROOT / "results" / "html" / "asv"
# Small cases whose setup needs no compiler.
HISTORY_CASES = (
    r"bench_step.*'plain'.*toy|bench_attention.ForwardBackward.*'(reference|tiled|sdpa-math)'.*N4,K4,S256"
)


def local_config() -> Path:
    """Write asv's configuration with this checkout's absolute places and local results; returns its path."""
    config = json.loads(re.sub(r"^\s*//.*$", "", (ROOT / "asv.conf.json").read_text(), flags=re.MULTILINE))
    del config["matrix"]  # the running Python is the environment
    config |= {
        "repo": str(ROOT),
        "branches": ["HEAD"],
        "benchmark_dir": str(ROOT / "benchmarks"),
        "env_dir": str(ROOT / ".asv" / "env"),
        "results_dir": str(LOCAL / "asv"),
        "html_dir": str(SITE),
    }
    path = LOCAL / "asv.conf.json"
    write_atomically(path, json.dumps(config, indent=1) + "\n")
    return path


def last_commits(count: int) -> list[str]:
    """The last commits on HEAD's first-parent line, oldest first."""
    return git(ROOT, "rev-list", "--first-parent", f"--max-count={count}", "HEAD").decode().split()[::-1]


def result_files(commit: str) -> list[Path]:
    """asv's local results of a commit."""
    return sorted((LOCAL / "asv" / "local").glob(f"{commit[:8]}-*.json"))


def asv(config: Path, command: str, *arguments: str, environment: dict[str, str] | None = None) -> int:
    """Run an asv command on the local configuration; returns its exit status.

    asv prints a line for each of its parameter combinations, most of which no case has: its output goes to
    results/local/asv.log, and is shown only when it fails.
    """
    words = [sys.executable, "-m", "asv", command, "--config", str(config), *arguments]
    done = subprocess.run(
        words,
        cwd=ROOT,
        check=False,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with (LOCAL / "asv.log").open("a") as log:
        log.write(done.stdout)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return done.returncode


def measure_history(count: int) -> list[str]:
    """Measure the last commits with asv, samples kept, under the machine name "local".

    Returns:
        the commits that have a result afterwards, oldest first.
    """
    config = local_config()
    asv(config, "machine", "--yes", "--machine", "local")
    commits = last_commits(count)
    for commit in commits:
        if result_files(commit):
            continue
        print(f"asv: {commit[:10]}", flush=True)
        with tempfile.TemporaryDirectory(prefix="trainstep-history-") as scratch:
            source = unpack_source(ROOT, commit, Path(scratch))
            asv(
                config, "run", "-E", f"existing:{sys.executable}", "--set-commit-hash", commit, "--machine", "local",
                "--record-samples", "--launch-method", "forkserver", "--bench", HISTORY_CASES,
                environment={"ASV_PYTHONPATH": str(source)},
            )  # fmt: skip
        for path in result_files(commit):
            stamp_asv(path, environment(choose_device("auto")))
    return [commit for commit in commits if result_files(commit)]


def publish() -> Path:
    """Make asv's site from the local results, readable offline; returns its page."""
    from benchmarks.report.asv_site import make_offline

    asv(local_config(), "publish", "--no-pull")
    return make_offline(SITE)
