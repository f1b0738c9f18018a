"""DataFrames as Markdown, LaTeX, Typst and CSV, with every cell shown literally.

Text in a table comes from outside (GPU names, commit subjects, parameters, error messages), so each format
has its own escape, and nothing in a cell can become markup. Numbers are rounded to four digits for reading;
CSV, which machines read, keeps them exact. An absent value is a dash, in CSV an empty field.
"""

import csv
import io
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

ABSENT = "–"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "$": r"\$",
        "&": r"\&",
        "#": r"\#",
        "%": r"\%",
        "_": r"\_",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\symbol{34}",
        "`": r"\symbol{96}",
        "'": r"\symbol{39}",
        "–": "--",
        "×": r"$\times$",
        "·": r"$\cdot$",
        "\u200b": "{}",
    }
)


def is_absent(value: Any) -> bool:
    """True for None, NaN, infinities and pandas' NA."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and not math.isfinite(value)


def is_number(value: Any) -> bool:
    """True for a finite number that is not a flag; numpy's scalars count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not is_absent(value)


def number(value: float) -> str:
    """Four significant digits, without exponents between 1e-4 and 1e9, thousands set apart."""
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4 or magnitude > 8:
        return f"{value:.3e}"
    return f"{value:,.{max(0, 3 - magnitude)}f}"


def plain(value: Any) -> str:
    """A cell as text on one line: numbers rounded, absent as a dash, control characters gone."""
    if is_absent(value):
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_number(value):
        return number(value.item() if hasattr(value, "item") else value)
    return _CONTROL.sub("", " ".join(str(value).split()))


def escape_markdown(text: str) -> str:
    """Text that GitHub-flavoured Markdown shows as it is inside a table cell."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~$!])", r"\\\1", text)
    return re.sub(
        r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text
    )  # inside a word it never means emphasis


def escape_latex(text: str) -> str:
    """Text that LaTeX sets as it is, with no package; doubled hyphens do not become dashes."""
    # A mark of ours between hyphens, which plain text never has, becomes a pair of braces.
    return re.sub("-(?=-)", "-\u200b", text).translate(_LATEX)


def escape_typst(text: str) -> str:
    """Text as a Typst string literal, which Typst shows without reading markup in it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _cells(frame: "DataFrame") -> tuple[list[str], list[list[Any]], list[bool]]:
    """Column names, rows of values, and which columns hold numbers only (set flush right)."""
    names = [str(name) for name in frame.columns]
    rows = [list(row) for row in frame.astype(object).itertuples(index=False, name=None)]
    numeric = [
        any(is_number(row[i]) for row in rows) and all(is_number(row[i]) or is_absent(row[i]) for row in rows)
        for i in range(len(names))
    ]
    return names, rows, numeric


def markdown(frame: "DataFrame") -> str:
    """A pipe table of GitHub-flavoured Markdown."""
    names, rows, numeric = _cells(frame)
    lines = [names, ["---:" if right else "---" for right in numeric]]
    lines[0] = [escape_markdown(plain(name)) for name in names]
    lines += [[escape_markdown(plain(value)) for value in row] for row in rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def latex(frame: "DataFrame") -> str:
    """A tabular with the rules of package booktabs."""
    names, rows, numeric = _cells(frame)

    def line(values: list[Any]) -> str:
        cells = [escape_latex(plain(value)) for value in values]
        if cells and cells[0][:1] in ("[", "*"):  # after \\ both would be read as its argument
            cells[0] = "{}" + cells[0]
        return " & ".join(cells) + r" \\"

    columns = "".join("r" if right else "l" for right in numeric)
    body = [line(list(names)), r"\midrule", *(line(row) for row in rows)]
    return "\n".join(
        [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}", ""]
    )


def typst(frame: "DataFrame") -> str:
    """A `table` call of Typst."""
    names, rows, numeric = _cells(frame)

    def line(values: list[Any]) -> str:
        return ", ".join(escape_typst(plain(value)) for value in values)

    align = ", ".join("right" if right else "left" for right in numeric)
    body = "".join(f"  {line(row)},\n" for row in rows)
    # The trailing comma makes one column's alignment an array too.
    head = f"#table(\n  columns: {len(names)},\n  align: ({align},),\n  table.header({line(list(names))}),\n"
    return f"{head}{body})\n"


def comma_separated(frame: "DataFrame") -> str:
    """RFC 4180 with a header row; numbers exact, absent values empty."""
    names, rows, _ = _cells(frame)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(["" if is_absent(value) else value for value in row] for row in rows)
    return out.getvalue()


FORMATS: dict[str, Callable[["DataFrame"], str]] = {
    "md": markdown,
    "tex": latex,
    "typ": typst,
    "csv": comma_separated,
}


def format_frame(frame: "DataFrame", name: str) -> str:
    """A DataFrame in one of the formats "md", "tex", "typ", "csv".

    Raises:
        ValueError: the format is unknown; the message lists the known ones.
    """
    if name not in FORMATS:
        raise ValueError(f"unknown table format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name](frame)
