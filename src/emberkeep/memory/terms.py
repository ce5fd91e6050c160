"""Texts as the words they are found by: folded, stemmed, and scripts without spaces in pairs of characters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import apsw

from emberkeep.text import encodable

_SCRIPTS = r"\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_UNSPACED_BYTES = 3
"""Each of these characters in UTF-8."""
_WORD = re.compile(r"\w+")
LONGEST = 64
"""Characters of a word that people could ask for; what is longer is data."""

Term = tuple[int, int, str]
"""Begin and end in bytes of the UTF-8 text, and the stem."""


def terms_of(text: str) -> list[Term]:
    encoded = encodable(text).encode()
    found = _tokenizer()(encoded, apsw.FTS5_TOKENIZE_DOCUMENT, None, include_colocated=False)
    if not _unspaced().search(text):
        return list(found)
    return [term for begin, end, stem in found for term in _split(begin, end, stem)]


def stems_of(text: str) -> list[str]:
    """Those of `terms_of`, in half the time where no text is without spaces."""
    if _unspaced().search(text):
        return [stem for _, _, stem in terms_of(text)]
    encoded = encodable(text).encode()
    found = _tokenizer()(
        encoded, apsw.FTS5_TOKENIZE_DOCUMENT, None, include_offsets=False, include_colocated=False
    )
    return list(found)


def asked_stems(query: str) -> list[str]:
    """The different words of a question in their order, without those that every question has."""
    stems = [stem for stem in dict.fromkeys(stems_of(query)) if len(stem) <= LONGEST]
    return [stem for stem in stems if stem not in _stop_stems()] or stems


def telling_words(text: str) -> str:
    """The text without what every sentence has; all of it where it has nothing else."""
    return " ".join(word for word in _WORD.findall(text) if word.lower() not in _STOP_WORDS) or text


def _split(begin: int, end: int, stem: str) -> Iterator[Term]:
    """A word as it is, but each two neighbours in a part of it that would have no spaces."""
    if len(stem.encode()) != end - begin:  # it was folded: where its parts are is not known
        yield begin, end, stem
        return
    for run in _runs().finditer(stem):
        if not run["unspaced"] or len(run[0]) == 1:
            yield begin, begin + len(run[0].encode()), run[0]
        else:
            for i in range(len(run[0]) - 1):
                start = begin + _UNSPACED_BYTES * i
                yield start, start + 2 * _UNSPACED_BYTES, run[0][i : i + 2]
        begin += len(run[0].encode())


_LISTED = """
a about again all also am an and any are as at be been but by call called can could did do does earlier for from
get give had has have he her him his how i if in into is it its just know let like may me mention mentioned might
my name named no not of on or our out please remember say said she should so some still talk talked tell than
that the their them then there these they thing things this those to told up us was we were what when where which
who whom whose why will with would you your s t d m re ve ll don
"""
_STOP_WORDS = frozenset(_LISTED.split())


# What takes a while is made when it is first needed: few conversations need any of it.


@cache
def _tokenizer() -> Any:
    return apsw.Connection(":memory:").fts5_tokenizer("porter", ["unicode61", "remove_diacritics", "2"])


@cache
def _unspaced() -> re.Pattern[str]:
    return re.compile(f"[{_SCRIPTS}]")


@cache
def _runs() -> re.Pattern[str]:
    return re.compile(f"(?P<unspaced>[{_SCRIPTS}]+)|[^{_SCRIPTS}]+")


@cache
def _stop_stems() -> frozenset[str]:
    return frozenset(stems_of(_LISTED))
