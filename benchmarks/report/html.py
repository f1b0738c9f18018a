"""HTML elements from Python, safe by construction: a plain string is text, and only `Html` is markup."""

import html
import json
from collections.abc import Iterable
from typing import Any


class Html(str):
    """Markup that was made here and needs no escape."""

    __slots__ = ()


def text(value: object) -> Html:
    """Text as HTML shows it literally, in content and in quoted attributes; markup stays markup."""
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def join(parts: Iterable[object]) -> Html:
    """Parts one after another; None is nothing."""
    return Html("".join(text(part) for part in parts if part is not None))


_VOID = {"meta", "input", "br", "hr"}


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_` stands for class, underscores in names for hyphens.

    None and False leave an attribute out, True leaves its name alone.
    """
    said = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        said += f" {key}" if value is True else f' {key}="{text(value)}"'
    if name in _VOID:
        return Html(f"<{name}{said}>")
    return Html(f"<{name}{said}>{join(children)}</{name}>")


def embedded_json(value: Any, **attributes: object) -> Html:
    """Data for the page's script: strict JSON (NaN raises) that cannot end the element it stands in."""
    escaped = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        escaped = escaped.replace(letter, f"\\u{ord(letter):04x}")
    return tag("script", Html(escaped), type="application/json", **attributes)
