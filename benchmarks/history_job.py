"""asv over the last commits of this checkout, with everything it leaves in git-ignored places.

`asv run` itself uses asv.conf.json as it stands and publishes under results/asv; this module is for whoever only
wants to see what the last commits did to the numbers on the machine at hand.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.cases.registries import ROOT
from benchmarks.measure.provenance import git
from benchmarks.measure.record import write_atomically

LOCAL = ROOT / "results" / "local"
# Small cases whose setup takes no compiler: every commit of a short history within a minute.
HISTORY_CASES = r"bench_step.*'plain'.*toy|bench_attention.*'(reference|tiled|sdpa-math)'.*S256"


def local_config() -> Path:
    """Write asv's configuration with this checkout's absolute places and local results; returns its path."""
    text = (ROOT / "asv.conf.json").read_text()
    config = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    config |= {
        "repo": str(ROOT),
        "branches": ["HEAD"],
        "benchmark_dir": str(ROOT / "benchmarks"),
        "env_dir": str(ROOT / ".asv" / "env"),
        "results_dir": str(LOCAL / "asv"),
        "html_dir": str(ROOT / "results" / "html" / "asv"),
    }
    path = LOCAL / "asv.conf.json"
    write_atomically(path, json.dumps(config, indent=1) + "\n")
    return path


def last_commits(count: int) -> list[str]:
    """The last commits on HEAD's first-parent line, oldest first."""
    return git(ROOT, "rev-list", "--first-parent", f"--max-count={count}", "HEAD").decode().split()[::-1]


def asv(*arguments: str) -> int:
    """Run asv on the local configuration; returns its exit status."""
    return subprocess.run([sys.executable, "-m", "asv", *arguments], cwd=ROOT, check=False).returncode


def measure_history(count: int) -> int:
    """`asv run` over the last commits with samples kept, under the machine name "local"; asv's exit status."""
    config = str(local_config())
    asv("machine", "--yes", "--machine", "local", "--config", config)
    commits = LOCAL / "commits"
    write_atomically(commits, "\n".join(last_commits(count)) + "\n")
    return asv(
        "run", f"HASHFILE:{commits}", "--config", config, "--machine", "local", "--record-samples",
        "--skip-existing-successful", "--bench", HISTORY_CASES,
    )  # fmt: skip
