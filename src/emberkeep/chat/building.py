"""What templates do to values when it can grow or walk far: each operation pays first (`budget`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from string import Formatter
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, do_indent

from emberkeep.chat.budget import spend, spend_on


class Turns:
    """A loop's iterable; keeps `len`, which `loop.length` and `loop.last` want."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            spend()
            yield item


def walked(value: Any) -> Any:
    """`value`, after paying for the walk that comparing, hashing or printing it will be."""
    if not isinstance(value, str):
        spend_on(value)
    return value


def concatenated(values: list[Any]) -> str:
    spend_on(values)
    return "".join(map(str, values))


def replaced(text: object, old: str, new: str, count: int | None = None) -> str:
    subject = str(walked(text))
    spend(len(subject) + subject.count(old) * len(new))
    return subject.replace(old, new, -1 if count is None else count)


def joined(values: Iterable[Any], separator: str = "") -> str:
    items = list(Turns(values))
    spend(len(items) * len(separator))
    spend_on(items)
    return separator.join(map(str, items))


def indented(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    spend(len(text) + (text.count("\n") + 1) * _width(width))
    return do_indent(text, width, first, blank)


def _width(indent: int | str) -> int:
    return max(indent, 0) if isinstance(indent, int) else len(indent)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As chat templates expect it: plain JSON, with no escaping for HTML."""
    spend_on(value)
    if indent is not None and _width(indent) > 16:
        raise SecurityError("it indents JSON by more than 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def formatted(pattern: str, *values: Any, **named: Any) -> str:
    """`str.format` with plain fields only: no attributes, no widths."""
    parts: list[Any] = []
    unnamed = iter(values)
    for literal, field, spec, conversion in Formatter().parse(pattern):
        parts.append(literal)
        if spec or conversion:
            raise SecurityError("it formats text with more than plain fields")
        if field is not None:
            parts.append(named[field] if field in named else values[int(field)] if field else next(unnamed))
    return concatenated(parts)


def walking(name: str) -> Callable[..., Any]:
    """Jinja's filter of this name, behind a walk over what it compares."""
    plain = FILTERS[name]

    def walk_first(*args: Any, **options: Any) -> Any:
        for arg in args:
            if not isinstance(arg, Environment):
                spend_on(arg)
        return plain(*args, **options)

    if hasattr(plain, "jinja_pass_arg"):
        walk_first.jinja_pass_arg = plain.jinja_pass_arg  # type: ignore[attr-defined]
    return walk_first
