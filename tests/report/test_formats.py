"""Tables as Markdown, LaTeX, Typst and CSV: every cell literal, absent values absent."""

import csv
import io
import json
import re
from html import unescape

import pandas
import pytest

from benchmarks.report.formats import FORMATS, format_frame, number, plain

EVIL = [
    "<script>alert(1)</script>",
    "a | b \\ c",
    "*bold* _it_ `code` [x](y) ~s~ # $x$",
    "{$}&%#_^~\\<>|\"'`",
    "-- --- ``quoted''",
    '"; #eval("x")',
    "two\nlines\r\x1b[31m",
    "&lt;already&gt;",
    "=1+1",
]


def evil_frame():
    return pandas.DataFrame({"text": EVIL, "value": [float(i) for i in range(len(EVIL))]})


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (1.0, "1.000"), (0.05932, "0.05932"), (1070.7, "1,071"), (123456.0, "123,456"),
     (12, "12"), (1_000_000, "1,000,000"), (1e-7, "1.000e-07"), (1e12, "1.000e+12"), (-2.5, "-2.500")],
)  # fmt: skip
def test_numbers_keep_four_digits(value, shown):
    assert number(value) == shown


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), pandas.NA])
def test_absent_is_a_dash_and_empty_in_csv(value):
    frame = pandas.DataFrame({"a": pandas.Series([value], dtype=object)})
    assert plain(value) == "–"
    assert format_frame(frame, "csv") == 'a\n""\n'
    for name in FORMATS:
        assert not re.search("nan|inf|NA", format_frame(frame, name))


def test_markdown_renders_to_the_very_text():
    from markdown_it import MarkdownIt

    rendered = MarkdownIt("gfm-like", {"linkify": False, "html": True}).render(
        format_frame(evil_frame(), "md")
    )
    cells = re.findall(r"<td>(.*?)</td>", rendered, flags=re.DOTALL)
    assert [unescape(cell) for cell in cells] == [plain(text) for text in EVIL]


def test_csv_gives_back_exact_text_and_numbers():
    frame = pandas.DataFrame({"text": EVIL, "value": [1 / 3] * len(EVIL)})
    rows = list(csv.reader(io.StringIO(format_frame(frame, "csv"), newline="")))
    assert rows[0] == ["text", "value"]
    assert [row[0] for row in rows[1:]] == EVIL
    assert float(rows[1][1]) == 1 / 3


def test_typst_cells_are_string_literals_with_the_very_text():
    text = format_frame(evil_frame(), "typ")
    cells = re.findall(r'"(?:[^"\\]|\\.)*"', text)
    # A Typst string escapes as JSON does for what is left in a cell.
    assert [json.loads(cell) for cell in cells[2::2]] == [plain(one) for one in EVIL]
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    assert outside.count("#") == 1 and "[" not in outside


def _latex_text(cell):
    """What LaTeX would set for a cell of ours."""
    named = {"textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textless": "<",
             "textgreater": ">", "textbar": "|"}  # fmt: skip
    cell = re.sub(r"\\symbol\{(\d+)\}", lambda m: f"\\symbol{m[1]};", cell)
    cell = re.sub(r"\\(text\w+)\{\}", lambda m: f"\\named{m[1]};", cell)
    # A lone pair of braces only separates; nothing else may be unescaped.
    cell = re.sub(r"(?<!\\)\{\}", "", cell)
    bare = re.sub(r"\\[{}$&#%_]|\\symbol\d+;|\\named\w+;", "", cell)
    assert not set(bare) & set("\\{}$&#%_~^<>|\"'`"), cell
    cell = re.sub(r"\\symbol(\d+);", lambda m: chr(int(m[1])), cell)
    return re.sub(r"\\named(\w+);|\\([{}$&#%_])", lambda m: named[m[1]] if m[1] else m[2], cell)


def test_latex_sets_the_very_text():
    lines = format_frame(evil_frame(), "tex").splitlines()
    body = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    cells = [re.split(r"(?<!\\)&", line.removesuffix(r" \\"))[0].rstrip() for line in body]
    assert [_latex_text(cell) for cell in cells] == [plain(text) for text in EVIL]
    assert not any("--" in cell for cell in cells)  # would become a dash


@pytest.mark.parametrize("start", ["[x]", "*x"])
def test_latex_row_cannot_become_the_argument_of_the_row_before(start):
    frame = pandas.DataFrame({"a": ["x", start]})
    body = format_frame(frame, "tex").split(r"\midrule")[1]
    assert r"\\" + "\n{}" + start in body


def test_numeric_columns_are_set_right():
    text = format_frame(evil_frame(), "tex")
    assert text.startswith(r"\begin{tabular}{lr}")
    assert "---:" in format_frame(evil_frame(), "md").splitlines()[1]


def test_unknown_format_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown table format 'docx'; known: md, tex, typ, csv"):
        format_frame(evil_frame(), "docx")
