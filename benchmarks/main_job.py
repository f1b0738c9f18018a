"""The main job, `python -m benchmarks.main_job`: from a clone to a page in a few minutes on two cores.

Smoke tier through pytest-benchmark, asv history of small cases over the last commits, the gate on the last
of them, tables beside the peers, and the page, whose path is the last line. Everything stays in git-ignored places.
Exit status: the first of pytest's, the gate's and the report's that is not 0.
"""

import argparse
import subprocess
import sys

from benchmarks.cases.registries import ROOT


def main() -> int:
    """Run all parts, whatever an earlier one answers, and return the status."""
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description=__doc__, formatter_class=formatter
    ).parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    from benchmarks.commands.printing import print_rows
    from benchmarks.history_job import measure_history, publish, result_files
    from benchmarks.measure.record import load

    def run(*words: str) -> int:
        return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=False).returncode

    print("— smoke tier through pytest-benchmark", flush=True)
    statuses = [run("pytest", "benchmarks", "-q", "--benchmark-autosave", "--benchmark-quiet")]
    print("— asv history", flush=True)
    commits = measure_history(3)
    if len(commits) > 1:
        print("— gate", flush=True)
        before, after = (str(result_files(commit)[0]) for commit in commits[-2:])
        statuses.append(run("benchmarks", "gate", "--baseline", before, "--current", after))
    publish()
    saved = sorted((ROOT / "results" / "local" / "pytest-benchmark").rglob("*.json"))
    if saved:
        print_rows(load(saved[-1:])[0])
    sys.stdout.flush()
    statuses.append(run("benchmarks", "report"))
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
