"""The page: self-contained, strict JSON inside, text from outside literal, every status and gap visible."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser

import pytest

from benchmarks.report.html import Html, embedded_json, tag, text
from benchmarks.report.page import build_page
from tests.report.synthetic import (
    COMMITS,
    CPU_ENV,
    EVIL_GPU,
    EVIL_SUBJECT,
    FINDINGS,
    REGRESSED,
    all_rows,
    is_peer,
    row,
)


class Elements(HTMLParser):
    """Elements with their attributes, and the text inside each kind of element."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.found, self.texts, self._open = [], [], []
        self.feed(page)

    def handle_starttag(self, name, attributes):
        self.found.append((name, dict(attributes)))
        if name not in ("meta", "input", "br", "hr"):
            self._open.append(name)

    def handle_endtag(self, name):
        assert self._open and self._open[-1] == name, f"</{name}> closes {self._open[-3:]}"
        self._open.pop()

    def handle_data(self, data):
        self.texts.append((self._open[-1] if self._open else "", data))

    def data(self, identity):
        """Embedded JSON, read strictly."""

        def refuse(word):
            raise AssertionError(f"{word} is not strict JSON")

        place = [name for name, a in self.found if name == "script"]
        scripts = [a for name, a in self.found if name == "script"]
        contents = [data for name, data in self.texts if name == "script"]
        assert len(place) == len(contents)
        (content,) = [c for a, c in zip(scripts, contents, strict=True) if a.get("id") == identity]
        return json.loads(content, parse_constant=refuse)

    def tables(self):
        """The copies of every table: name -> format -> text."""
        packed = self.data("tables")
        return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in packed.items()}


@pytest.fixture(scope="module")
def made():
    return build_page(
        all_rows(),
        is_peer=is_peer,
        commits=COMMITS,
        findings=FINDINGS,
        damaged=["records/x/<b>.jsonl: skipped, damaged: line 3"],
    )


@pytest.fixture(scope="module")
def elements(made):
    return Elements(made.html)


def test_nothing_is_fetched(made, elements):
    for name, attributes in elements.found:
        assert name not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        if name == "a":
            assert attributes["href"].startswith("#")
    assert not re.search(r"@import|url\(\s*['\"]?(?!#|data:)", re.sub(r"url\(#\$\{clip\}\)", "", made.html))


def test_only_the_pages_own_script_may_run(elements):
    (policy,) = [a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy and re.search(r"script-src 'sha256-[\w+/]+=*'", policy)
    assert "unsafe-inline" not in policy.split("script-src")[1]
    assert not any(key.startswith("on") for _, attributes in elements.found for key in attributes)


def test_text_from_outside_is_literal(made, elements):
    assert sum(name == "script" for name, _ in elements.found) == 4  # three data blocks and the page's own
    for evil in (EVIL_GPU, EVIL_SUBJECT):
        assert evil not in made.html
    shown = "".join(data for name, data in elements.texts if name not in ("script", "style"))
    assert EVIL_GPU in shown and "records/x/<b>.jsonl" in shown and "evil<b>" in shown
    points = [p for chart in elements.data("charts") for s in chart["series"] for p in s["points"]]
    notes = [point["note"] for point in points if "note" in point]
    assert any(EVIL_SUBJECT in note for note in notes)


def test_data_is_strict_json_with_gaps_as_null(elements):
    found = elements.data("charts")
    (chart,) = [c for c in found if c["title"] == REGRESSED]
    values = [point["y"] for point in chart["series"][0]["points"]]
    assert values[2] is None and values[5] is None and 0 not in values
    assert len({c["id"] for c in found}) == len(found)


def test_every_status_and_reason_is_visible(elements):
    shown = "".join(data for name, data in elements.texts if name not in ("script", "style"))
    for status in ("ok", "oom", "error", "skipped", "red"):
        assert any(a.get("class") == f"status {status}" for _, a in elements.found), status
    for reason in ("asked for 8.00 GiB, 1.20 GiB free", "no kernel below 1024", "rank 1: TimeoutError"):
        assert reason in shown


def test_the_regression_is_announced_with_its_commit(elements):
    shown = "".join(data for name, data in elements.texts if name not in ("script", "style"))
    assert "1 regression" in shown and "15% slower" in shown and "44444444 Mask keys in a loop" in shown


def test_a_possible_regression_is_no_alarm():
    finding = FINDINGS[0] | {"sure": False}
    page = build_page(all_rows(), is_peer=is_peer, commits=COMMITS, findings=[finding]).html
    assert "1 possible regression" in page and "possibly 15% slower" in page and "1 regression<" not in page


def test_every_figure_and_every_table_can_be_taken_away(made, elements):
    named = {a["data-chart"] for name, a in elements.found if name == "figure"}
    assert named == {chart.id for chart in made.figures} and len(named) >= 8
    assert named <= {chart["id"] for chart in elements.data("charts")}
    sheets = {a["id"] for _, a in elements.found if a.get("class") == "sheet"}
    assert elements.tables() == made.tables and sheets == set(made.tables)
    for texts in made.tables.values():
        assert set(texts) == {"md", "tex", "typ", "csv"} and all(texts.values())
    copies = [a["data-copy"] for _, a in elements.found if "data-copy" in a]
    assert copies == ["md", "tex", "typ", "csv"] * len(sheets)


def test_machine_and_versions_stand_beside_the_numbers(elements):
    where = [data for name, data in elements.texts if name == "div" and "torch 2.11.0" in data]
    figures = [a["data-chart"] for name, a in elements.found if name == "figure"]
    gpu = [name for name in figures if name.startswith("gpu-h200")]
    assert len(where) > len(gpu) >= 2 and all("NVIDIA H200" in line or EVIL_GPU in line for line in where)


def test_identifiers_are_distinct_and_links_lead_somewhere(elements):
    ids = [a["id"] for _, a in elements.found if "id" in a]
    assert len(ids) == len(set(ids))
    for name, attributes in elements.found:
        if name == "a":
            assert attributes["href"][1:] in ids
    opened = {a["data-open"] for _, a in elements.found if "data-open" in a}
    assert opened <= {chart["id"] for chart in elements.data("charts")}


def test_machines_with_alike_names_have_a_part_each():
    rows = [row("step/plain/forward/toy,B4,S8,fp32,w1", 1.0, machine=name) for name in ("a-b", "a_b", "A B")]
    parts = [
        a["id"]
        for _, a in Elements(build_page(rows, is_peer=is_peer).html).found
        if a.get("class") == "machine"
    ]
    assert len(parts) == len(set(parts)) == 3


def test_the_page_of_field_case_r1():
    """One out of memory, one skipped, one single sample, one time of zero: all there, strict, told apart."""
    tail = "B1,N1,K1,S64,T64,H8,causal,fp32,w1"
    rows = [
        row(f"attention/reference/forward/{tail}", status="oom", reason="asked for 1 GiB"),
        row(f"attention/tiled/forward/{tail}", status="skipped", reason="not here"),
        row(f"attention/triton/forward/{tail}", 1.0, samples=1),
        row(f"attention/ring/forward/{tail}", 0.0),
    ]
    elements = Elements(build_page(rows, is_peer=is_peer).html)
    (csv,) = [texts["csv"] for name, texts in elements.tables().items() if name.endswith("attention")]
    by_name = {line.split(",")[0]: line for line in csv.splitlines()}
    assert set(by_name) == {"implementation", "reference", "tiled", "triton", "ring"}
    assert ",oom," in by_name["reference"] and ",skipped," in by_name["tiled"]
    assert ",0.0," in by_name["ring"] and ",0.0," not in by_name["reference"]


def test_no_rows_make_a_page_that_says_so():
    assert "Nothing has been measured yet." in build_page([], is_peer=is_peer).html


def test_other_areas_are_shown():
    page = build_page([row("kernel/rms_norm/forward/B4,D64,fp32,w1", 1.0, env=CPU_ENV)], is_peer=is_peer)
    assert "Other cases" in page.html and "rms_norm" in page.html


def test_elements_escape_what_is_not_markup():
    assert (
        tag("p", "<b>", Html("<i>x</i>"), None, title='"q"')
        == '<p title="&quot;q&quot;">&lt;b&gt;<i>x</i></p>'
    )
    assert (
        tag("input", hidden=True, disabled=False, class_="a", data_x=1)
        == '<input hidden class="a" data-x="1">'
    )
    assert text("'") == "&#x27;"


def test_embedded_json_cannot_end_its_element_and_is_strict():
    value = ["</script><!--", "\u2028", "&amp;"]
    markup = embedded_json(value, id="x")
    assert markup.count("<") == 2 and json.loads(re.sub("<.*?>", "", markup)) == value
    with pytest.raises(ValueError, match="JSON"):
        embedded_json([float("nan")])
