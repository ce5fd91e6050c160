"""How well a turn answers a question, from 0 to 1, and the passage that shows it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emberkeep.memory.finding import Word
from emberkeep.memory.terms import Term, clean, stems_of, terms_of

_SATURATION = 0.8
_LENGTH = 0.3
"""BM25's k1 and b; the usual 1.2 and 0.75 are for pages. Turns are short, and small models repeat themselves."""
_WEIGHTS = (1.3, 0.6, 0.4)
"""What a word counts for where it stands: what people said themselves is what they ask for."""
_APART = 0.7
"""What it costs when the words stand in different sentences, or not at all: the answer to a question has them in
one, and the same question about something else has them all over its own answer."""
_SENTENCES = 40
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|\n+")
_RECENT = 0.15
"""Share of the score that age takes away in the end: an old exact answer stays before a vague new one."""
_HALF_LIFE_S = 30 * 86400.0
_UNRELATED, _SAME = 0.12, 0.6
"""Cosines of texts that have nothing to do with each other, and of the same thing in other words."""
_MEANT = 0.8
"""What the same meaning counts for without a single common word."""
_SNIPPET = 24
_HITS = 500
_LEAD = 4
"""Words of a highlight, those of a text that it may begin with, how many stand before one of them."""

Texts = tuple[str, str, str]
"""What the user said, what the assistant said, and what went to and came from tools."""


@dataclass(frozen=True, slots=True)
class Question:
    words: Sequence[Word]
    usual_length: float
    """Of a turn, in words."""
    known: Mapping[int, float]
    """Turns with the weight of those words that they are known to have, somewhere."""


def relevance(texts: Texts, length: int, question: Question, known: float) -> float:
    """BM25 with a weight for each part of a turn, as a share of what a turn could have at most.

    `texts` may be only the beginning of a turn of `length` words: what is `known` of it counts in any case.
    """
    best: float = sum(word.weight for word in question.words)
    if best <= 0:
        return 0.0
    parts = [(weight, _sentences(text)) for weight, text in zip(_WEIGHTS, texts, strict=True) if text]
    slack = _SATURATION * (1 - _LENGTH + _LENGTH * length / max(question.usual_length, 1.0))
    gained: float = 0.0
    for word in question.words:
        often = sum(weight * stems.count(word.stem) for weight, sentences in parts for stems in sentences)
        gained += word.weight * often / (often + slack)
    least = known * _WEIGHTS[-1] / (_WEIGHTS[-1] + slack)
    together = max((_had(question, stems) for _, sentences in parts for stems in sentences), default=0.0)
    return max(gained, least) / best * (1 - _APART * (1 - together))


def _sentences(text: str) -> list[list[str]]:
    """The stems of each."""
    pieces = _SENTENCE_END.split(text, maxsplit=_SENTENCES)
    return [stems_of(piece) for piece in pieces]


def _had(question: Question, stems: list[str]) -> float:
    """The share of the words that a sentence has, of those that any turn has. Whatever they weigh: a name that a
    small model repeats in all of its answers weighs nothing, and is still what was asked for."""
    known = [word.stem for word in question.words if word.turns]
    return sum(stem in stems for stem in known) / max(len(known), 1)


def freshness(age_s: float) -> float:
    fresh: float = 0.5 ** (max(age_s, 0.0) / _HALF_LIFE_S)
    return 1 - _RECENT * (1 - fresh)


def fused(said: float, meant: float) -> float:
    """The score for the same words and for the same meaning (a cosine): either is enough, both are better.

    Ranks are not fused, as is usual: the nearest vector of a question about nothing that is remembered would be
    worth as much as a perfect match.
    """
    near = min(max((meant - _UNRELATED) / (_SAME - _UNRELATED), 0.0), 1.0)
    return 1 - (1 - said) * (1 - _MEANT * near)


def highlight(texts: tuple[str, str], words: Sequence[Word]) -> str:
    """The passage with the most of the words, each with **marks** around it; the beginning where there is none."""
    weights = {word.stem: word.weight for word in words}
    said = [(text, terms_of(text)) for text in texts]
    passages = [_best_passage(terms, weights) for _, terms in said]
    chosen = max((0, 1), key=lambda i: passages[i][0])
    text, terms = said[chosen]
    return _marked(clean(text).encode(), terms, passages[chosen][1], weights)


def _best_passage(terms: list[Term], weights: dict[str, float]) -> tuple[float, int]:
    """(weight of the different words in it, index of its first word)."""
    hits = [i for i, (_, _, stem) in enumerate(terms) if stem in weights][:_HITS]
    best = (0.0, 0)
    for first, hit in enumerate(hits):
        within = {terms[i][2] for i in hits[first : bisect_left(hits, hit + _SNIPPET - _LEAD)]}
        best = max(best, (sum(weights[stem] for stem in within), max(0, hit - _LEAD)), key=lambda one: one[0])
    return best


def _marked(said: bytes, terms: list[Term], first: int, weights: dict[str, float]) -> str:
    shown = terms[first : first + _SNIPPET]
    begin = shown[0][0] if first else 0
    end = shown[-1][1] if first + _SNIPPET < len(terms) else len(said)
    pieces, at = [], begin
    for start, stop, stem in shown:
        if stem in weights and start >= at:
            pieces += [said[at:start], b"**", said[start:stop], b"**"]
            at = stop
    marked = b"".join([*pieces, said[at:end]]).decode().strip()
    return f"{'…' if begin else ''}{marked}{'…' if end < len(said) else ''}"
