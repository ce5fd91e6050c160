"""Texts as the words they are found by: folded, stemmed, and scripts without spaces in pairs of characters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import apsw

_TOKENIZER = apsw.Connection(":memory:").fts5_tokenizer("porter", ["unicode61", "remove_diacritics", "2"])
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
_UNSPACED_BYTES = 3
"""Each of these in UTF-8."""
LONGEST = 64
"""Characters of a word that people could ask for; what is longer is data."""

Term = tuple[int, int, str]
"""Begin and end in bytes of the UTF-8 text, and the stem."""


def terms_of(text: str) -> list[Term]:
    encoded = clean(text).encode()
    found: Any = _TOKENIZER(encoded, apsw.FTS5_TOKENIZE_DOCUMENT, None, include_colocated=False)
    if not _UNSPACED.search(text):
        return list(found)
    return [term for begin, end, stem in found for term in _pairs(begin, end, stem)]


def stems_of(text: str) -> list[str]:
    """Those of `terms_of`, in half the time where no text is without spaces."""
    if _UNSPACED.search(text):
        return [stem for _, _, stem in terms_of(text)]
    encoded = clean(text).encode()
    found: Any = _TOKENIZER(
        encoded, apsw.FTS5_TOKENIZE_DOCUMENT, None, include_offsets=False, include_colocated=False
    )
    return list(found)


def asked_stems(query: str) -> list[str]:
    """The different words of a question in their order, without those that every question has."""
    stems = [stem for stem in dict.fromkeys(stems_of(query)) if len(stem) <= LONGEST]
    return [stem for stem in stems if stem not in _STOP_STEMS] or stems


def clean(text: str) -> str:
    """Without halves of characters, which no file can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _pairs(begin: int, end: int, stem: str) -> Iterator[Term]:
    """Each two neighbours of a word whose characters are all of a script without spaces."""
    if len(stem) == 1 or end - begin != _UNSPACED_BYTES * len(stem):
        yield begin, end, stem
        return
    for i in range(len(stem) - 1):
        start = begin + _UNSPACED_BYTES * i
        yield start, start + 2 * _UNSPACED_BYTES, stem[i : i + 2]


_STOP_WORDS = """
a about all also am an and any are as at be been but by can could did do does for from get give had has have he her
him his how i if in into is it its just know let like may me might my no not of on or our out please remember say
said she should so some tell than that the their them then there these they this those to told up us was we were
what when where which who whom whose why will with would you your s t d m re ve ll don
"""
_STOP_STEMS = frozenset(stems_of(_STOP_WORDS))
