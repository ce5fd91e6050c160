"""Where the drafts of one sequence come from.

What a grammar forces comes first, then what exactly this text was followed by before. Then what the client
predicts or the sequence itself contains, where the answer writes it again with changes; and what followed the
latest tokens when they stood there before: in one of these, or in earlier sequences of the same user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from emberkeep.chat.prompt import Prompt
from emberkeep.kv.drafts.ngram_index import MAX_MATCH, Continuation, NgramIndex, agreement
from emberkeep.sched.rewriting import Rewriting
from emberkeep.sched.sampling import Sampler
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types.lineage import Lineage
from emberkeep.types.models import Vocab
from emberkeep.types.speculation import DraftSource
from emberkeep.values import dataclass

PATH_TOKENS = 512
"""How far a stored path is followed."""
_LONGEST_REST = 3
"""Steps in a row in which nothing is looked for."""
_SURE = 16
"""What so many tokens have matched is not looked for elsewhere."""
_KNOWN_PLACE = 2
"""A token that agrees where it was expected says as much as so many that agree anywhere."""
_REPEATED = 8
"""After so many tokens that stood together before, a text seems to be written again."""


@dataclass(frozen=True, slots=True)
class Draft:
    tokens: TokenArray
    source: DraftSource
    matched: int
    """How many of the latest tokens stood before it where it was found."""
    agreement: Sequence[float]
    """For each token, how likely it seems that it comes after those before it, and all of them."""
    is_rewriting: bool = False
    """Whether it stands in a text that the answer writes again with changes."""
    sure: Sequence[float] = ()
    """For each token, how likely the model that drafts it takes it to be; empty where none does."""


class Corpus(Protocol):
    """What an owner's earlier prompts and answers contain."""

    def prepare(self, lineage: Lineage) -> None:
        """Something will be looked up soon. Quick."""

    def find(self, lineage: Lineage, context: TokenArray, limit: int) -> Continuation | None:
        """What followed the longest suffix of `context`. Never blocks."""

    def path(self, lineage: Lineage, tokens: TokenArray, limit: int) -> TokenArray:
        """What followed exactly these tokens, from the first one on; empty where nothing did."""

    def add(self, lineage: Lineage, tokens: TokenArray, new_from: int) -> None:
        """A turn has ended, in which the tokens from `new_from` on are new."""


@dataclass(slots=True)
class Trust:
    """How much more, or less, of the drafts of one sequence is accepted than expected."""

    _expected: float = 0.0
    _accepted: float = 0.0

    @property
    def factor(self) -> float:
        return (self._accepted + 2) / (self._expected + 2)

    def add(self, expected: float, accepted: int) -> None:
        self._expected = 0.8 * self._expected + expected
        self._accepted = 0.8 * self._accepted + accepted

    def rest(self) -> None:
        """A step later: what was once refused may be right by now."""
        self._expected *= 0.99
        self._accepted *= 0.99


class SequenceDrafts:
    """Belongs to the engine's thread."""

    def __init__(self, prompt: Prompt, asked: TokenArray, sampler: Sampler, corpus: Corpus, vocab: Vocab) -> None:
        """`asked`: the tokens that the answer, of which the first one was just sampled, comes after."""
        self.trust = Trust()
        self.model_trust = Trust()
        """In what a draft model drafts: it may know a text that never was before, or not understand it at all."""
        self._sampler = sampler
        self._corpus = corpus
        self._vocab = vocab
        self._lineage = prompt.lineage
        self._context = _KnownText(DraftSource.CONTEXT, asked)
        self._indexed = 0
        """How many sampled tokens are in it."""
        self._in_vain = self._steps_without = 0
        """How often in a row what was found was of no use, and how many steps nothing is looked for."""
        self._has_looked = False
        self._prediction = _KnownText(DraftSource.PREDICTION, np.array(prompt.prediction, np.int32))
        self._prediction.expect()
        self._path: _Path | None = _Path(corpus.path(self._lineage, prompt.tokens, PATH_TOKENS))

    def propose(self, text: TokenArray, sampled: int, limit: int) -> Iterator[Draft]:
        """What may come after `text`, of which the last `sampled` tokens are the answer; at most `limit` tokens
        each."""
        self._take_in(text, sampled)
        for draft in self._sources(text, sampled, limit):
            if count := self._sampler.count_allowed(draft.tokens[: self._count_said(draft.tokens)]):
                yield replace(draft, tokens=draft.tokens[:count], agreement=draft.agreement[:count])

    def was_used(self, is_used: bool) -> None:
        """Whether the latest drafts were worth a step. While they are not, there are steps in which nothing is
        looked for: looking takes time, too."""
        if is_used:
            self._in_vain = self._steps_without = 0
        elif self._has_looked:
            self._in_vain = min(self._in_vain + 1, 2 * _LONGEST_REST)
            self._steps_without = self._in_vain // 2

    def _count_said(self, tokens: TokenArray) -> int:
        """How many come before the end of the answer, and are tokens of this model: files may hold anything."""
        vocab = self._vocab
        ends = (i for i, token in enumerate(tokens.tolist()) if token in vocab.eog or not 0 <= token < vocab.size)
        return next(ends, len(tokens))

    def _sources(self, text: TokenArray, sampled: int, limit: int) -> Iterator[Draft]:
        self._has_looked = False
        if forced := self._sampler.forced_tokens(limit):
            yield _assumed(np.array(forced, np.int32), DraftSource.GRAMMAR, len(forced))
            return
        if self._path is not None:
            answer = text[len(text) - sampled :]
            if len(tokens := self._path.after(answer, limit)):
                yield _assumed(tokens, DraftSource.PATH, min(len(answer), MAX_MATCH))
                return
            self._path = None
        for known in (self._prediction, self._context):
            if (draft := known.follow(limit)) is not None:
                yield draft
                if draft.matched >= _SURE and len(draft.tokens) == limit:
                    return
        if self._steps_without:
            self._steps_without -= 1
        else:
            self._has_looked = True
            yield from self._found(text[-MAX_MATCH:], limit)

    def _found(self, latest: TokenArray, limit: int) -> Iterator[Draft]:
        for text in (self._prediction, self._context):
            if (draft := text.find(latest, limit)) is not None:
                yield draft
                if draft.matched >= _SURE:
                    return
        found = self._corpus.find(self._lineage, latest, limit)
        if found is not None:
            yield Draft(found.tokens, DraftSource.CORPUS, found.matched, found.agreement)

    def _take_in(self, text: TokenArray, sampled: int) -> None:
        """What was sampled since the last time."""
        if fresh := sampled - self._indexed:
            tokens = text[len(text) - fresh :]
            self._prediction.rewriting.add(tokens.tolist())
            self._context.rewriting.add(tokens.tolist())
            self._context.index.extend(tokens)
            self._indexed += fresh


class _KnownText:
    """A text that the answer may repeat, as it is or with changes."""

    def __init__(self, source: DraftSource, tokens: TokenArray) -> None:
        self.source = source
        self.index = NgramIndex()
        self.rewriting = Rewriting(self.index)
        self._start = self.index.begin(tokens)

    def expect(self) -> None:
        """From its beginning on."""
        self.rewriting.begin(self._start, _SURE)

    def follow(self, limit: int) -> Draft | None:
        """What comes next if it is being written again."""
        matched = self.rewriting.matched
        tokens = self.rewriting.draft(limit) if matched else []
        if not tokens:
            return None
        chances = agreement(1, [1] * len(tokens), _KNOWN_PLACE * matched)
        return Draft(np.array(tokens, np.int32), self.source, matched, chances, is_rewriting=True)

    def find(self, latest: TokenArray, limit: int) -> Draft | None:
        """What followed the latest tokens in it."""
        found = self.index.find(latest, limit) if len(self.index) else None
        if found is None:
            return None
        if found.matched >= (_SURE if self.rewriting.is_followed else _REPEATED):
            self.rewriting.begin(found.place, found.matched)
        return Draft(found.tokens, self.source, found.matched, found.agreement)


_CHANCES = {DraftSource.GRAMMAR: 0.97, DraftSource.PATH: 0.93}


def _assumed(tokens: TokenArray, source: DraftSource, matched: int) -> Draft:
    """Nothing but its source says how likely it is."""
    chances = np.cumprod(np.full(len(tokens), _CHANCES[source]))
    return Draft(tokens, source, matched, chances.tolist())


class _Path:
    """What an answer is from its first token on, as long as it is."""

    def __init__(self, tokens: TokenArray) -> None:
        self._tokens = tokens
        self._met = 0
        """Tokens of the answer that were as expected."""

    def after(self, answer: TokenArray, limit: int) -> TokenArray:
        """What comes next; nothing once it was not as expected."""
        expected = self._tokens[self._met : len(answer)]
        if common_prefix(expected, answer[self._met :]) < len(answer) - self._met:
            self._tokens = self._tokens[:0]
        self._met = len(answer)
        return self._tokens[self._met : self._met + limit]
