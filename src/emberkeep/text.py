"""Texts from elsewhere: files, programs, web servers, MCP servers, models. They are data, whatever they say."""

from __future__ import annotations

import codecs
import difflib
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any, AnyStr

_SAMPLE = 8192
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_WIDE = re.compile(r"utf-?(16|32)([bl]e)?", re.IGNORECASE)
# Python has codecs that take quadratic time, or are no charsets at all.
_CHARSET = re.compile(
    rf"{_WIDE.pattern}|utf-?8|(us-)?ascii|latin-?1|iso-8859-\d+|(windows-|cp)125\d|koi8-[ru]"
    r"|gb(k|2312|18030)|big5|shift[_-]jis|euc-(jp|kr)",
    re.IGNORECASE,
)

# Control characters drive terminals; invisible ones and tags hide instructions from the person who approves.
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"
    "\ufe00-\ufe0e\ufeff\U000e0000-\U000e01ef]"
)


def decode_text(data: bytes, charset: str | None = None) -> str | None:
    """Its text, with marks for what cannot be read; None where it is binary."""
    if data.startswith(_UTF16):
        charset = "utf-16"
    elif charset is None or not _CHARSET.fullmatch(charset):
        charset = "utf-8-sig"
    if b"\0" in data[:_SAMPLE] and not _WIDE.fullmatch(charset):
        return None
    text = data.decode(charset, "replace")
    return None if 10 * text.count("\ufffd") > len(text) else text


def strip_hidden(text: str) -> str:
    """Without characters that a reader does not see. Lines and tabs stay."""
    return HIDDEN.sub("", text.replace("\r\n", "\n"))


def strip_hidden_json(value: Any) -> Any:
    """The same for every text in a JSON value."""
    if isinstance(value, str):
        return strip_hidden(value)
    if isinstance(value, list):
        return [strip_hidden_json(item) for item in value]
    if isinstance(value, dict):
        return {strip_hidden(str(key)): strip_hidden_json(item) for key, item in value.items()}
    return value


def exceeds_depth(value: Any, levels: int) -> bool:
    """Whether objects and lists are nested deeper than `levels`. Not recursive."""
    level = [value]
    for _ in range(levels):
        level = [child for parent in level for child in _containers(parent)]
        if not level:
            return False
    return True


def _containers(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in children if isinstance(child, (dict, list))]


def encodable(text: str) -> str:
    """A plain `str` without halves of characters, which no file can hold and no protocol can send."""
    return text if type(text) is str and text.isascii() else text.encode("utf-8", "replace").decode()


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def common_start(a: AnyStr, b: AnyStr) -> int:
    """How many characters or bytes both begin with. Found by halving: slices are compared faster than those."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_end(a: str, b: str) -> int:
    """How many characters both end with."""
    return common_start(a[::-1], b[::-1])


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a sentence about a name that is not known: the nearest that is, or `otherwise`."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


_MAX_NESTING = 100


def alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Whichever of them comes first, the longest where several begin there; None where there are none.

    Beginnings that several have in common are compared once: `re` tries alternatives one by one, and a vocabulary
    with 6,000 of them that begin with `<` would make every `<` of a text cost as much as 6,000 comparisons.
    """
    distinct = sorted({text for text in texts if text})
    if not distinct:
        return None
    pattern = _one_of(distinct, _MAX_NESTING)
    longest_first = sorted(distinct, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if pattern is None else pattern)


def _one_of(texts: list[str], nesting: int) -> str | None:
    """A pattern for `texts`, which are sorted; None where `re` could not read it, so deep would it be."""
    start = texts[0][: common_start(texts[0], texts[-1])]
    rests = [text[len(start) :] for text in texts]
    if rests == [""]:
        return re.escape(start)
    if not nesting:
        return None
    branches = [_one_of(list(same), nesting - 1) for first, same in groupby(rests, lambda rest: rest[:1]) if first]
    if None in branches:
        return None
    # An empty alternative, the last to be tried, where one of them ends here already.
    ends = [""] if not rests[0] else []
    return re.escape(start) + "(?:" + "|".join([*filter(None, branches), *ends]) + ")"
