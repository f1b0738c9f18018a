"""asv and pytest-benchmark as their users drive them, on a copy of the tree."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import main_job

ROOT = Path(__file__).resolve().parents[2]
SELECTED = "attention/reference/forward/B1,N4,K4,S256"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A committed copy of the tree without results."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("src", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "conftest.py", "asv.conf.json", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    git(copy, "init", "-q", "-b", "main")
    git(copy, "add", "-A")
    git(copy, "commit", "-qm", "all")
    return copy


def environment(home):
    # pytest-benchmark takes a pytest started by an xdist worker for another worker, and measures nothing.
    dropped = ("PYTHONPATH", "TRITON_INTERPRET")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("PYTEST_")}
    return kept | {"HOME": str(home), "GIT_CONFIG_GLOBAL": os.devnull, "OMP_NUM_THREADS": "1"}


def git(copy, *arguments):
    who = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    subprocess.run(["git", *who, *arguments], cwd=copy, check=True, env=environment(copy))


def python(copy, *arguments, **more):
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=copy,
        capture_output=True,
        text=True,
        env=environment(copy) | more,
        timeout=280,
    )


def test_autosave_compare_and_compare_fail(copy):
    """The three options of pytest-benchmark, on one case that a commit makes half a second slower."""
    words = ["pytest", "benchmarks", "-q", "-k", "attention and forward/B1 and S256 and reference/"]
    saved = python(copy, *words, "--benchmark-autosave")
    assert saved.returncode == 0, saved.stdout
    (file,) = (copy / "results/local/pytest-benchmark").rglob("0001_*.json")
    stored = json.loads(file.read_text())
    assert stored["machine_info"]["node"] == "local"
    assert stored["machine_info"]["trainstep"]["torch"]
    assert any(entry["extra_info"]["case"].startswith(SELECTED) for entry in stored["benchmarks"])
    for entry in stored["benchmarks"]:
        assert entry["stats"]["rounds"] >= 5
        assert entry["extra_info"]["check"]["error"] <= entry["extra_info"]["check"]["budget"]
        assert entry["extra_info"]["metrics"]["flops"]["value"] > 0

    compare = ["--benchmark-compare=0001", "--benchmark-compare-fail=median:400%"]
    same = python(copy, *words, *compare)
    assert same.returncode == 0, same.stdout
    source = copy / "src/trainstep/attention/reference.py"
    before = source.read_text()
    source.write_text(before + "\n\n_fast = attention\n\n\ndef attention(*arguments, **options):\n"
                      "    import time\n\n    time.sleep(0.5)\n    return _fast(*arguments, **options)\n")  # fmt: skip
    try:
        slow = python(copy, *words, *compare)
    finally:
        source.write_text(before)
    assert slow.returncode == 1 and "Performance has regressed" in slow.stdout + slow.stderr


def test_asv_measures_a_commit_and_publishes_it(copy):
    """A real asv run with samples kept; a commit that lacks the target is n/a; publish accepts both."""
    config = copy / "asv.conf.json"
    assert (
        python(copy, "asv", "machine", "--yes", "--machine", "test", "--config", str(config)).returncode == 0
    )
    without = copy / "without"
    shutil.copytree(copy / "src", without)
    shutil.rmtree(without / "trainstep" / "attention")
    git(copy, "commit", "-q", "--allow-empty", "-m", "second")
    commits = subprocess.run(
        ["git", "rev-list", "HEAD"], cwd=copy, capture_output=True, text=True, check=True
    ).stdout.split()
    for commit, source in zip(commits, (copy / "src", without), strict=True):
        done = python(
            copy, "asv", "run", "--config", str(config), "-E", f"existing:{sys.executable}", "--machine", "test",
            "--set-commit-hash", commit, "--record-samples", "--bench", r"bench_attention.Forward.*'reference', 'B1,N4,K4,S256",
            ASV_PYTHONPATH=str(source),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def result(commit):
        (path,) = (copy / "results/asv/test").glob(f"{commit[:8]}-*.json")
        stored = json.loads(path.read_text())
        entry = dict(
            zip(stored["result_columns"], stored["results"]["bench_attention.Forward.sampled"], strict=False)
        )
        return [value for value in entry["result"] if value is not None], entry.get("samples")

    values, samples = result(commits[0])
    (measured,) = [value for value in values if not math.isnan(value)]
    assert measured > 0
    assert next(len(taken) for taken in samples if taken) >= 10
    assert all(math.isnan(value) for value in result(commits[1])[0])
    published = python(copy, "asv", "publish", "--config", str(config), "--no-pull")
    assert published.returncode == 0, published.stdout + published.stderr
    assert (copy / "results/html/asv/index.json").exists()


def test_pytest_knows_every_option_without_the_plugins_of_the_test_environment(copy):
    """`tox -e bench` has pytest-benchmark alone."""
    done = python(
        copy, "pytest", "-p", "no:timeout", "--collect-only", "-q", "benchmarks/pytests/test_memory.py"
    )
    assert done.returncode == 0 and "Unknown config option" not in done.stdout + done.stderr, done.stdout


@pytest.mark.parametrize(("arguments", "status"), [(["--machine", "a b"], 2), (["more"], 2), (["--help"], 0)])
def test_the_main_job_takes_no_arguments_and_says_so(arguments, status, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["main_job", *arguments])
    monkeypatch.setattr(main_job.subprocess, "run", lambda *_, **__: pytest.fail("the job began"))
    with pytest.raises(SystemExit) as ended:
        main_job.main()
    out, err = capsys.readouterr()
    assert ended.value.code == status and err.count("\n") == (status == 2)
    assert " ".join(arguments) in err if status else main_job.__doc__.strip() in out
