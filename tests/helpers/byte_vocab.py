"""A byte-level vocabulary, awkward enough: words overlap, characters can be split; what comes out of a
`TextStream` over it, and a model that knows nothing but the mask of a grammar.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emberkeep.chat.grammar import Matcher
from emberkeep.chat.output import OutputOptions, TextStream
from emberkeep.types.events import Event, ReasoningDelta, TextDelta, ToolCallDelta
from emberkeep.types.models import Vocab

_WORDS = ["Hello", " world", "</", "think", '{"', '":', "tool", "_call", "\n\n", "ST", "OP", " é", "é"]


class TinyVocab:
    """Tokenises greedily, longest piece first. Special texts are given per test."""

    def __init__(
        self,
        specials: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
        *,
        words: Sequence[str] = _WORDS,
        splits_at_specials: bool = True,
    ) -> None:
        plain = [bytes([i]) for i in range(256)] + [word.encode() for word in words]
        self.pieces: list[bytes] = plain + [text.encode() for text in specials]
        self.size = len(self.pieces)
        self.specials = {text: len(plain) + i for i, text in enumerate(specials)}
        self.controls = frozenset(self.specials.values())
        self.eog = frozenset({self.size - 1})
        self.bos = None
        self.eos = self.size - 1
        self.adds_bos = False
        self.splits_at_specials = splits_at_specials
        self._whole = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))))
        longest_first = sorted(plain, key=len, reverse=True)
        self._plain = re.compile(b"|".join(map(re.escape, longest_first)), re.DOTALL)
        self._ids = {piece: i for i, piece in enumerate(plain)}
        self.tokenized: list[str] = []

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        self.tokenized.append(text)
        ids: list[int] = []
        start = 0
        for match in self._whole.finditer(text) if parse_special else ():
            ids += self._bytes(text[start : match.start()])
            ids.append(self.specials[match[0]])
            start = match.end()
        return ids + self._bytes(text[start:])

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode()

    def _bytes(self, text: str) -> list[int]:
        return [self._ids[piece] for piece in self._plain.findall(text.encode("utf-8", "surrogatepass"))]


def allowed(matcher: Matcher) -> list[int]:
    mask = matcher.mask()
    assert mask is not None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def walk(vocab: Vocab, matcher: Matcher, seed: int, limit: int = 400) -> list[int]:
    """Sampled tokens of a model that knows nothing but the mask."""
    rng = random.Random(seed)
    ids: list[int] = []
    while len(ids) < limit and not matcher.finished:
        choices = allowed(matcher)
        ending = [token for token in choices if token in vocab.eog]
        token = rng.choice(ending or choices)
        matcher.advance(token)
        if token in vocab.eog:
            break
        ids.append(token)
    return ids


@dataclass
class Answer:
    text: str = ""
    reasoning: str = ""
    names: list[str | None] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[int] = field(default_factory=list)
    stopped: bool = False
    pushed: int = 0

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case TextDelta():
                    self.text += event.text
                    self.tokens += event.tokens
                    self.logprobs += [logprob.token_id for logprob in event.logprobs]
                case ReasoningDelta():
                    self.reasoning += event.text
                case ToolCallDelta():
                    self.add_call(event)

    def add_call(self, event: ToolCallDelta) -> None:
        if event.name is not None:
            self.names.append(event.name)
            self.ids.append(event.id)
            self.arguments.append("")
        assert event.call_index == len(self.names) - 1
        assert (event.id is None) == (event.name is None)
        self.arguments[-1] += event.arguments

    @property
    def calls(self) -> list[tuple[str | None, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in zip(self.names, self.arguments, strict=True)]


class Pieces:
    """A vocabulary whose tokens are the given texts, so that a stream sees exactly these pieces."""

    def __init__(self, vocab: Vocab, texts: list[str]) -> None:
        self.pieces = [text.encode() for text in texts]
        self.specials = dict.fromkeys(vocab.specials, -1)
        self.controls = frozenset[int]()
        self.eog = frozenset[int]()


def read_text(vocab: Vocab, pieces: list[str], *, cut: bool = False, **options: Any) -> Answer:
    """The answer when it is sampled in these pieces."""
    stream = TextStream(Pieces(vocab, pieces), OutputOptions(**options))  # type: ignore[arg-type]
    answer = Answer()
    for token in range(len(pieces)):
        events, answer.stopped = stream.push(token)
        answer.add(events)
        if answer.stopped:
            break
    answer.add(stream.finish(cut=cut))
    return answer
