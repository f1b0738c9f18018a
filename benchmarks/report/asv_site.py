"""Make the site that `asv publish` wrote readable offline, from file://.

asv's own pages take their scripts from the network. asv-tachyon's pages bring theirs along, but as a module
that fetches JSON, and browsers refuse both for file://. So its pages are installed, the results are put into
a script beside them, and `fetch` is answered from there; over HTTP the same files work unchanged.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.measure.record import write_atomically

_DATA = "offline.js"
# Requests that name one of the files are answered; every other goes where it would have gone.
_SHIM = """(() => {
  const files = new Map(Object.entries(window.__offline)), real = window.fetch;
  const here = new URL(".", location.href).pathname;
  window.fetch = (request, options) => {
    const asked = new URL(request instanceof Request ? request.url : request, location.href).pathname;
    const name = asked.startsWith(here) ? decodeURIComponent(asked.slice(here.length)) : null;
    if (files.has(name)) return Promise.resolve(new Response(files.get(name)));
    if (location.protocol === "file:") return Promise.resolve(new Response("", { status: 404 }));
    return real(request, options);
  };
})();
"""


def make_offline(html_dir: Path) -> Path:
    """Install asv-tachyon's pages over a published site and let them open from file://; returns their path.

    Nothing is done where they are there: `asv publish` writes its own page anew, and this one's is written last.

    Raises:
        ValueError: there is no published site, or asv-tachyon is missing or fails.
    """
    if not (html_dir / "index.json").is_file():
        raise ValueError(f"no asv site in {html_dir}: run `asv publish` first")
    index = html_dir / "index.html"
    if _DATA in index.read_text(encoding="utf-8"):
        return index
    command = [sys.executable, "-m", "asv_tachyon", "install", str(html_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise ValueError(
            f"asv-tachyon could not be installed over the asv site: {lines[-1] if lines else 'failed'}"
        )
    files = {
        path.relative_to(html_dir).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(html_dir.rglob("*.json"))
    }
    write_atomically(html_dir / _DATA, f"window.__offline = {json.dumps(files)};\n{_SHIM}")
    write_atomically(index, _classic(index.read_text(encoding="utf-8")))
    return index


def _classic(page: str) -> str:
    """The page with its module as an ordinary deferred script, after the data; no cross-origin requests."""
    page = re.sub(r'<script type="module"( crossorigin)? ', "<script defer ", page)
    page = page.replace('<link rel="stylesheet" crossorigin ', '<link rel="stylesheet" ')
    page = page.replace("<script defer ", f'<script src="./{_DATA}"></script>\n    <script defer ', 1)
    if _DATA not in page or 'type="module"' in page:
        raise ValueError(
            "asv-tachyon's page has another shape than the one known here: it would not open offline"
        )
    return page
