"""The page in a real browser from file:// with no network: drawn, quiet, and answering."""

import json
import time

import pytest

from benchmarks.report.page import build_page
from tests.report.browser import Browser, find_browser
from tests.report.synthetic import COMMITS, FINDINGS, REGRESSED, STEADY, all_rows, is_peer

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="needs a Chromium on the path to open the page in"
)
READY = "document.documentElement?.dataset.ready"


@pytest.fixture(scope="module")
def made():
    return build_page(all_rows(), is_peer=is_peer, commits=COMMITS, findings=FINDINGS)


@pytest.fixture(scope="module")
def browser(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "index.html").write_text(made.html, encoding="utf-8")
    one = Browser(folder / "profile")
    try:
        one.call(
            "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder), eventsEnabled=False
        )
        one.folder = folder
        yield one
    finally:
        one.close()


@pytest.fixture
def page(browser):
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(browser.folder / "index.html", READY)
    yield browser
    assert browser.complaints == []


def middle(page, selector):
    """The place of an element, scrolled into view."""
    return page.value(
        f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
        "e.scrollIntoView({block: 'center', behavior: 'instant'}); "
        "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )


def test_everything_is_drawn_without_a_request(page, made):
    assert page.value(READY) == str(len(made.figures))
    assert page.value("document.querySelectorAll('figure svg[role=img]').length") == len(made.figures)
    assert page.value(
        "[...document.querySelectorAll('figure svg[role=img]')].every(s => s.querySelector('path, rect'))"
    )
    assert page.value("document.querySelectorAll('.sheet tbody tr').length") > 100
    assert page.value("document.title") == "trainstep benchmarks"  # the evil commit subject did not run
    assert all(url.startswith("file:") for url in page.requests) and len(page.requests) == 1


def test_no_number_is_broken(page):
    values = "[...document.querySelectorAll('svg *')].flatMap(e => [...e.attributes].map(a => a.value))"
    bad = f"{values}.filter(value => /NaN|Infinity|undefined/.test(value))"
    assert page.value(f"{bad}.length") == 0


def test_one_machine_at_a_time_and_links_lead_to_the_others(page):
    shown = "[...document.querySelectorAll('.machine')].filter(m => m.offsetParent).map(m => m.id)"
    assert page.value(shown) == ["machine--cpu-2core"]  # the one with the regression comes first
    page.value("location.hash = 'machine--gpu-h200--attention'")
    page.wait(f"{shown}[0] === 'machine--gpu-h200'")
    assert page.value("document.getElementById('machine').value") == "machine--gpu-h200"


def test_a_column_sorts_as_numbers_with_absent_last(page):
    table = "document.querySelector('#gpu-h200-attention table')"
    column = f"[...{table}.tHead.rows[0].cells].findIndex(c => c.textContent.startsWith('TFLOP/s'))"
    texts = f"[...{table}.tBodies[0].rows].map(r => r.cells[{column}].textContent)"
    for descending in (False, True):
        page.value(f"{table}.tHead.rows[0].cells[{column}].querySelector('button').click()")
        found = page.value(texts)
        numbers = [float(text) for text in found if text != "–"]
        assert numbers == sorted(numbers, reverse=descending) and len(numbers) > 10
        assert set(found[len(numbers) :]) == {"–"}


def test_rows_are_filtered_by_words(page):
    page.value(
        "(() => { const f = document.querySelector('#gpu-h200-attention .filter'); f.value = 'triton 4,096'; "
        "f.dispatchEvent(new Event('input')); })()"
    )
    left = page.value(
        "[...document.querySelectorAll('#gpu-h200-attention tbody tr')].filter(r => !r.hidden)"
        ".map(r => r.textContent)"
    )
    assert len(left) == 2 and all("triton" in text and "4,096" in text for text in left)
    assert page.value("document.querySelector('#gpu-h200-attention .shown-rows').textContent").startswith(
        "2 of "
    )


def test_pointing_at_a_chart_shows_values_and_reasons(page):
    page.value("location.hash = 'machine--gpu-h200--attention'")
    figure = "figure[data-chart^='gpu-h200-attention-forward-b1'] .canvas"
    page.wait(f"document.querySelector({json.dumps(figure)}).clientWidth > 0")
    x, y, width, height = middle(page, figure)
    page.mouse("mouseMoved", x + width - 20, y + height / 2)
    tip = f"document.querySelector({json.dumps(figure + ' .tip')})"
    page.wait(f"{tip}.style.display === 'block'")
    text = page.value(f"{tip}.textContent")
    assert "16k" in text and "triton" in text and "ms" in text
    assert "oom: asked for 8.00 GiB, 1.20 GiB free" in text


def test_the_legend_hides_a_line(page):
    figure = "document.querySelector('figure[data-chart^=\"gpu-h200-attention-forward-b1\"]')"
    lines = f"{figure}.querySelectorAll('svg[role=img] path[stroke]').length"
    before = page.value(lines)
    page.value(f"{figure}.querySelector('.legend button').click()")
    assert page.value(lines) < before
    assert page.value(f"{figure}.querySelector('.legend button').getAttribute('aria-pressed')") == "false"


def test_dragging_zooms_and_a_double_click_shows_all(page):
    page.value("location.hash = 'machine--cpu-2core--history'")
    texts = "[...document.querySelectorAll('figure.viewer svg[role=img] text')].map(t => t.textContent)"
    assert "00000000" in page.value(texts)
    x, y, width, height = middle(page, "figure.viewer .canvas")
    held = {"button": "left", "buttons": 1, "clickCount": 1}
    page.mouse("mousePressed", x + width * 0.5, y + height / 2, **held)
    page.mouse("mouseMoved", x + width * 0.8, y + height / 2, buttons=1)
    page.mouse("mouseReleased", x + width - 5, y + height / 2, **held)
    page.wait(f"!{texts}.includes('00000000')")
    assert "77777777" in page.value(texts)
    page.value("document.querySelector('figure.viewer .canvas').dispatchEvent(new MouseEvent('dblclick'))")
    assert "00000000" in page.value(texts)


def test_history_marks_the_commit_and_opens_other_cases(page):
    title = "document.querySelector('figure.viewer h3').textContent"
    svg = "document.querySelector('figure.viewer svg[role=img]').textContent"
    assert page.value(title) == REGRESSED and "15% slower: 44444444" in page.value(svg)
    page.value(
        "[...document.querySelectorAll('tr[data-open]')]"
        f".find(r => r.textContent.includes({json.dumps(STEADY)})).click()"
    )
    assert page.value(title) == STEADY and "torch 2.13.0" in page.value(svg)
    assert page.value("document.querySelectorAll('tr[data-open] svg.spark').length") == 2


def test_the_theme_changes_and_is_remembered(page):
    ground = "getComputedStyle(document.body).backgroundColor"
    name = "document.documentElement.dataset.theme"
    before, first = page.value(ground), page.value(name)
    page.value("document.querySelector('.theme').click()")
    assert page.value(ground) != before and page.value(name) != first
    page.open(page.folder / "index.html", READY)
    assert page.value(name) != first
    page.value("document.querySelector('.theme').click()")


@pytest.mark.parametrize("kind", ["SVG", "PNG"])
def test_a_figure_is_downloaded(page, kind):
    page.value(
        "[...document.querySelectorAll(\"figure[data-chart='cpu-2core-step-toy-b4-s128-fp32-w1'] .tools button\")]"
        f".find(b => b.textContent === '{kind}').click()"
    )
    path = page.folder / f"cpu-2core-step-toy-b4-s128-fp32-w1.{kind.lower()}"
    deadline = time.monotonic() + 30
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline, "no download"
        page.value("new Promise(done => setTimeout(done, 50))")
    if kind == "PNG":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    svg = path.read_text(encoding="utf-8")
    assert (
        svg.startswith("<svg") and "Step time by phase" in svg and "torch 2.13.0" in svg and "forward" in svg
    )


def test_a_table_is_copied_in_every_format(page, made):
    page.value("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    for kind in ("md", "tex", "typ", "csv"):
        page.value(f"document.querySelector('#cpu-2core-steps [data-copy={kind}]').click()")
        page.wait(f"window.copied === {json.dumps(made.tables['cpu-2core-steps'][kind])}")


def test_a_narrow_window_needs_no_sideways_scrolling(page):
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    try:
        page.open(page.folder / "index.html", READY)
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert (
            page.value(
                "Math.max(...[...document.querySelectorAll('figure svg[role=img]')].map(s => s.clientWidth))"
            )
            <= 390
        )
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")
