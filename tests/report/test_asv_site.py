"""asv's published site opens from file:// after `make_offline`."""

import datetime
import json
import shutil
import subprocess
import sys

import pytest

from benchmarks.commands.report import make_report
from benchmarks.report.asv_site import make_offline
from tests.report.browser import Browser, find_browser

asv_results = pytest.importorskip("asv.results", reason="asv is not installed")
pytest.importorskip("asv_tachyon", reason="asv-tachyon is not installed")

NAME = "bench_attention.Forward.sampled"
PARAMETERS = [["'reference'", "'tiled'"], ["'B1,S64,fp32,w1'"]]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A site published by asv from results written for three commits."""
    from asv.runner import BenchmarkResult

    root = tmp_path_factory.mktemp("site")

    def git(*arguments):
        author = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.invalid"]
        return subprocess.run(
            ["git", *author, *arguments], cwd=root, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q", "-b", "main")
    for subject in ("one", "two", "three"):
        git("commit", "-q", "--allow-empty", "-m", subject)
    folder = root / "stored"
    machine = {"arch": "x86_64", "cpu": "c", "machine": "m", "num_cpu": "2", "os": "Linux", "ram": "1"}
    (folder / "m").mkdir(parents=True)
    (folder / "m" / "machine.json").write_text(json.dumps(machine | {"version": 1}))
    described = {"code": "", "name": NAME, "param_names": ["target", "shape"], "params": PARAMETERS,
                 "timeout": 60.0, "type": "time", "unit": "seconds", "version": "1"}  # fmt: skip
    (folder / "benchmarks.json").write_text(json.dumps({NAME: described, "version": 2}))
    config = {"version": 1, "project": "scratch", "repo": str(root), "branches": ["main"], "dvcs": "git",
              "environment_type": "virtualenv", "results_dir": "stored", "html_dir": "html"}  # fmt: skip
    (root / "asv.conf.json").write_text(json.dumps(config))
    for number, commit in enumerate(git("rev-list", "--reverse", "main").split()):
        date = int(git("show", "-s", "--format=%ct", commit)) * 1000
        stored = asv_results.Results(machine | {"python": "3.11"}, {}, commit, date, "3.11", "env", {})
        result = BenchmarkResult(result=[0.01 * (number + 1), 0.02], samples=[[0.01], [0.02]], number=[1, 1],
                                 errcode=0, stderr="", profile=None)  # fmt: skip
        stored.add_result(described, result, started_at=datetime.datetime.now(datetime.UTC), duration=1.0)
        stored.save(str(folder))
    subprocess.run(
        [sys.executable, "-m", "asv", "publish"], cwd=root, check=True, capture_output=True, timeout=60
    )
    return root / "html"


def test_no_published_site(tmp_path):
    with pytest.raises(ValueError, match=r"no asv site in .*: run `asv publish` first"):
        make_offline(tmp_path)


def test_twice_is_once(site):
    first = make_offline(site).read_text()
    assert make_offline(site).read_text() == first and first.count("offline.js") == 1
    assert 'type="module"' not in first and "crossorigin" not in first


def test_the_page_makes_the_site_beside_it_open_offline(site, tmp_path):
    shutil.copytree(site, tmp_path / "asv")
    subprocess.run([sys.executable, "-m", "asv", "publish", "--html-dir", str(tmp_path / "asv")],
                   cwd=site.parent, check=True, capture_output=True, timeout=60)  # fmt: skip
    assert "offline.js" not in (tmp_path / "asv" / "index.html").read_text()
    page = make_report(site.parent, tmp_path)
    assert "offline.js" in (tmp_path / "asv" / "index.html").read_text()
    assert "asv/index.html" in page.read_text()


@pytest.mark.skipif(find_browser() is None, reason="needs a Chromium on the path to open the page in")
def test_the_site_shows_its_graphs_from_a_file(site, tmp_path):
    index = make_offline(site)
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(index, f"document.body?.textContent.includes({json.dumps(NAME)})")
        browser.wait("document.querySelector('svg path, svg polyline, canvas')")
        assert browser.complaints == []
        assert all(url.startswith(("file:", "data:")) for url in browser.requests)
    finally:
        browser.close()
