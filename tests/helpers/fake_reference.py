"""What a model without any cache would answer: the deterministic engine, fresh for every question.

A client sends an assistant's text back, and the server may use the ids that were sampled or, where
a crash took those away, those of the tokenizer. Both are right, so a prompt has as many tokenizations as its
messages have together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from emberkeep.engine.base import Rows
from emberkeep.engine.fake import FakeEngine, FakeVocab

VOCAB = FakeVocab()
_START, _END = VOCAB.specials["<|im_start|>"], VOCAB.specials["<|im_end|>"]

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """One message, and every list of token ids that its content may have."""

    role: str
    text: str
    tokenizations: tuple[Ids, ...]

    def json(self) -> dict[str, str]:
        return {"role": self.role, "content": self.text}


def said(role: str, text: str, sampled: Ids = ()) -> Said:
    """`sampled` begins with the ids behind the text, if the model wrote it."""
    plain = tuple(VOCAB.tokenize(text))
    behind = _leading(sampled, text)
    return Said(role, text, (plain,) if behind in ((), plain) else (behind, plain))


def possible_prompts(messages: list[Said]) -> Iterator[Ids]:
    """Every prompt that the server may make of these messages."""
    header = tuple(VOCAB.tokenize("assistant\n"))
    for contents in itertools.product(*(message.tokenizations for message in messages)):
        parts = [_message(said.role, content) for said, content in zip(messages, contents, strict=True)]
        yield (*itertools.chain(*parts), _START, *header)


def greedy(prompt: Ids, max_tokens: int, *, bias: Mapping[int, float] | None = None, weights: str = "fake") -> Ids:
    engine = FakeEngine(weights=weights)
    added = np.zeros(VOCAB.size, np.float32)
    for token, amount in (bias or {}).items():
        added[token] = amount
    engine.evaluate([Rows(0, 0, np.array(prompt, np.int32), True)])
    answer: list[int] = []
    while len(answer) < max_tokens:
        token = int((engine.logits(0) + added).argmax())
        if token in VOCAB.eog:
            break
        answer.append(token)
        engine.evaluate([Rows(0, len(prompt) + len(answer) - 1, np.array([token], np.int32), True)])
    return tuple(answer)


def text_of(ids: Ids) -> str:
    return b"".join(VOCAB.pieces[token] for token in ids).decode()


def _message(role: str, content: Ids) -> Ids:
    return (_START, *VOCAB.tokenize(f"{role}\n"), *content, _END, *VOCAB.tokenize("\n"))


def _leading(sampled: Ids, text: str) -> Ids:
    """The first of the sampled ids whose text is exactly `text`; none when it ends inside a token."""
    for count in range(len(sampled) + 1):
        if text_of(sampled[:count]) == text:
            return sampled[:count]
    return ()
