"""Where the drafts of one sequence come from.

What a grammar forces comes first, then what exactly this text was followed by before. Then what the client
predicts or the sequence itself contains, where the answer writes it again with changes; and what followed the
latest tokens when they stood there before: in one of these, or in earlier sequences of the same user.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeVar

import numpy as np

from emberkeep.chat.prompt import Prompt
from emberkeep.kv.corpus import TokenCorpus
from emberkeep.kv.ngram_index import MAX_MATCH, NgramIndex, agreement
from emberkeep.sched.sampling import Sampler
from emberkeep.token_arrays import TokenArray, common_prefix
from emberkeep.types.models import DraftSource, Vocab
from emberkeep.values import dataclass

Drafting = TypeVar("Drafting")
"""What drafts are for."""
PATH_TOKENS = 512
"""How far a stored path is followed."""
_SURE = 16
"""What so many tokens have matched is not looked for elsewhere."""
_KNOWN_PLACE = 2
"""A token that agrees where it was expected says as much as so many that agree anywhere."""
_REPEATED = 8
"""After so many tokens that stood together before, a text seems to be written again."""


_REMEMBERED = 256.0
"""Expected tokens that count: what is older counts half as much."""


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


@dataclass(slots=True)
class Acceptance:
    """How much of what was expected to be accepted was. What is older counts less."""

    prior: float
    prior_accepted: float
    """What is assumed before anything is known: so much of so much was accepted."""
    expected: float = 0.0
    accepted: float = 0.0

    @property
    def value(self) -> float:
        return (self.accepted + self.prior_accepted) / (self.expected + self.prior)

    def add(self, expected: float, accepted: int) -> None:
        if self.expected >= _REMEMBERED:
            self.fade(0.5)
        self.expected += expected
        self.accepted += accepted

    def fade(self, share: float) -> None:
        self.expected *= share
        self.accepted *= share


class Trust(Acceptance):
    """How much more, or less, of the drafts of one sequence is accepted than expected."""

    def __init__(self) -> None:
        super().__init__(2.0, 2.0)

    def settle(self, chances: Sequence[float], accepted: int) -> None:
        """A draft was evaluated, and so many of its tokens were accepted."""
        self.fade(0.8)
        self.add(sum(chances[: accepted + 1]), accepted)

    def rest(self) -> None:
        """A step later: what was once refused may be right by now."""
        self.fade(0.99)


class SequenceDrafts:
    """Belongs to the engine's thread."""

    def __init__(
        self, prompt: Prompt, asked: TokenArray, sampler: Sampler, corpus: TokenCorpus, vocab: Vocab
    ) -> None:
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
        self.are_used = False
        """The latest ones were worth a step."""
        self.looked = 0
        """In which step something was looked for."""
        self._prediction = _KnownText(DraftSource.PREDICTION, np.array(prompt.prediction, np.int32))
        self._prediction.expect()
        self._path: _Path | None = _Path(corpus.path(self._lineage, prompt.tokens, PATH_TOKENS))

    def propose(self, text: TokenArray, sampled: int, limit: int) -> Iterator[Draft]:
        """What may come after `text`, of which the last `sampled` tokens are the answer; at most `limit` tokens
        each."""
        self._take_in(text, sampled)
        for draft in self._sources(text, sampled, limit):
            if count := self._sampler.count_allowed(draft.tokens[: self._count_usable(draft.tokens)]):
                yield replace(draft, tokens=draft.tokens[:count], agreement=draft.agreement[:count])

    def _count_usable(self, tokens: TokenArray) -> int:
        """How many come before the end of the answer, and are tokens of this model: files may hold anything."""
        vocab = self._vocab
        ends = (i for i, token in enumerate(tokens.tolist()) if token in vocab.eog or not 0 <= token < vocab.size)
        return next(ends, len(tokens))

    def _sources(self, text: TokenArray, sampled: int, limit: int) -> Iterator[Draft]:
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
        self.rewriting.begin(self._start, _SURE)

    def follow(self, limit: int) -> Draft | None:
        matched = self.rewriting.matched
        tokens = self.rewriting.draft(limit) if matched else []
        if not tokens:
            return None
        chances = agreement(1, [1] * len(tokens), _KNOWN_PLACE * matched)
        return Draft(np.array(tokens, np.int32), self.source, matched, chances, is_rewriting=True)

    def find(self, latest: TokenArray, limit: int) -> Draft | None:
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


_AHEAD = 32
"""Tokens of the old text that may have been left out where the answer goes on with it."""
_LONGEST_CHANGE = 24
"""Tokens that are written instead; after more of them the old text is no longer looked for."""
_COMES_AGAIN = 8
"""Tokens of a change that is expected again."""
_DOUBT = 4
"""A token that differs leaves so small a part of what spoke for the place."""
_FOUND_AGAIN = 2
"""Tokens that must agree where the answer goes on with the old text; after fewer it is drafted as a guess."""

Tokens = tuple[int, ...]


@dataclass(slots=True)
class _Change:
    """What is being written instead of what stands at `place`."""

    place: int
    written: list[int] = field(default_factory=list)


class Rewriting:
    """Belongs to one thread."""

    def __init__(self, text: NgramIndex) -> None:
        self.matched = 0
        """How many of the latest tokens speak for it: those since the last change, and a part of those before."""
        self._text = text
        self._place: int | None = None
        """Where in the old text that stands which comes next."""
        self._due: Tokens = ()
        """What is expected before it, as the rest of `_change`."""
        self._change: _Change | None = None
        self._known: dict[int, dict[Tokens, Tokens]] = {}
        """What was changed, and into what; by its first token."""

    @property
    def is_followed(self) -> bool:
        return self._place is not None

    def begin(self, place: int, matched: int) -> None:
        """The answer goes on there, after so many tokens that agree."""
        self._place, self.matched = place, matched
        self._due, self._change = (), None

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self._place is None:
                return
            if self._due:
                self._go_on_in_change(token)
            elif self._change is None:
                self._go_on(token)
            else:
                self._change.written.append(token)
                self._find_again()

    def draft(self, limit: int) -> list[int]:
        if (place := self._place) is None:
            return []
        old = self._text.read(place, limit)
        tokens, at = list(self._due), 0
        while at < len(old) and len(tokens) < limit:
            before, after = self._expected(old, at)
            tokens += after
            at += len(before)
        return tokens[:limit]

    def _go_on(self, token: int) -> None:
        assert self._place is not None
        old = self._text.read(self._place, _COMES_AGAIN)
        before, after = self._expected(old, 0)
        if after[:1] == (token,):
            self._agrees()
            self._due = after[1:]
            self._change = _Change(self._place, [token]) if self._due else None
            self._place += len(before)
        elif old[:1] == [token]:
            del self._known[token][before]  # not any more
            self._agrees()
            self._place += 1
        else:
            self._differs(_Change(self._place, [token]))

    def _go_on_in_change(self, token: int) -> None:
        assert self._change is not None
        self._change.written.append(token)
        if token == self._due[0]:
            self._due = self._due[1:]
            self._agrees()
            if not self._due:
                self._change = None
        else:
            self._due = ()
            self._differs(self._change)

    def _agrees(self) -> None:
        self.matched = min(self.matched + 1, MAX_MATCH)

    def _differs(self, change: _Change) -> None:
        self._change = change
        self.matched = min(self.matched, MAX_MATCH) // _DOUBT
        self._find_again()

    def _find_again(self) -> None:
        """Where the answer goes on with the old text; a guess, until enough of it agrees."""
        assert self._change is not None
        written = self._change.written
        if len(written) > _LONGEST_CHANGE:
            self._place = self._change = None
            return
        old = self._text.read(self._change.place, _AHEAD + len(written))
        ends = [end for end, token in enumerate(old, 1) if token == written[-1]]
        one_for_one = min(len(written), len(old))
        agree, _, end = max(
            ((_common_suffix(old[:end], written), -abs(end - one_for_one), end) for end in ends),
            default=(0, 0, one_for_one),
        )
        self._place = self._change.place + end
        if not agree:
            self.matched //= _DOUBT
        if agree >= _FOUND_AGAIN:
            self.matched += agree
            self._learn(tuple(old[: end - agree]), tuple(written[:-agree]), written[-agree])
            self._change = None

    def _learn(self, before: Tokens, after: Tokens, following: int) -> None:
        if not before or not after:
            before, after = (*before, following), (*after, following)
        if len(before) <= _COMES_AGAIN and len(after) <= _COMES_AGAIN:
            self._known.setdefault(before[0], {})[before] = after

    def _expected(self, old: list[int], at: int) -> tuple[Tokens, Tokens]:
        """What stands at a place of the old text, as far as it goes together, and what is expected instead."""
        for before, after in self._known.get(old[at], {}).items() if at < len(old) else ():
            if tuple(old[at : at + len(before)]) == before:
                return before, after
        return (same := tuple(old[at : at + 1])), same


def _common_suffix(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count


# ── how many tokens of which drafts ──

WORTH = 1.03
"""Drafting has to give so many times the tokens per second: measurements are not exact, and it takes time, too."""
_WORTH_BESIDE = 0.02
"""And so much more for each other sequence: steps were measured with one, and beside others rows cost more."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A draft as it is evaluated, with how likely each of its tokens was taken to be, given those before it."""

    draft: Draft
    count: int
    chances: Sequence[float]

    def expected_tokens(self, count: int | None = None) -> float:
        """Tokens that are accepted, of the first `count`."""
        return sum(together(self.chances[:count]))


@dataclass(frozen=True, slots=True)
class StepCost:
    """The step that drafts are for."""

    seconds: Callable[[int, int, int], float]
    """What a step takes: by its rows, by how many tokens there are before each of them in its sequence, and by how
    many of them have logits after them."""
    decoding: int
    """Sequences with one row each, whatever is drafted."""
    beside: int
    room: int
    depth: int
    host_s: float = 0.0
    """What it takes more where something is drafted: it cannot be launched before the tokens are known."""

    def cost(self, drafted: int) -> float:
        """Seconds that it takes for what it decodes and drafts, besides what it takes for its other rows."""
        alone = self.seconds(self.beside, self.depth, 1) if self.beside else 0.0
        sampled = self.decoding + drafted
        seconds = self.seconds(sampled + self.beside, self.depth, sampled) + (self.host_s if drafted else 0.0)
        return max(seconds - alone, 1e-9)


def share(drafts: Mapping[Drafting, Chosen], step: StepCost) -> tuple[dict[Drafting, int], float]:
    """How many tokens of each draft are evaluated: the likeliest ones, as long as more tokens per second come out
    of it. Returns the tokens per second, too."""
    likely = sorted(
        ((chance, s) for s, chosen in drafts.items() for chance in together(chosen.chances)),
        key=lambda each: -each[0],
    )
    expected = float(step.decoding)
    plain = expected / step.cost(0)
    best, best_rate = 0, (WORTH + _WORTH_BESIDE * (step.decoding - 1)) * plain
    most = min(len(likely), step.room)
    for count, (chance, _) in enumerate(likely[:most], 1):
        expected += chance
        cost = step.cost(count)
        if expected > best_rate * cost:
            best, best_rate = count, expected / cost
        elif expected + chance * (most - count) <= best_rate * cost:
            break  # not even if the rest took no time
    counts: dict[Drafting, int] = defaultdict(int)
    for _, sequence in likely[:best]:
        counts[sequence] += 1
    return counts, best_rate if best else plain


def together(chances: Sequence[float]) -> list[float]:
    """How likely it is that each token is accepted with all those before it."""
    all_before, product = [], 1.0
    for chance in chances:
        product *= chance
        all_before.append(product)
    return all_before
