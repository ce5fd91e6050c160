"""The seam of embedding engines: many token sequences in, one vector for each of them out.

An engine holds no state between two calls. One thread owns it and calls `embed` and `close`; the rest is
immutable and free for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from emberkeep.types.request import Pooling
from emberkeep.values import dataclass

Vectors = npt.NDArray[np.float32]
"""A row for each input."""


class TextVocab(Protocol):
    """What of a `Vocab` is needed here. Unlike there, pieces need not be all of a text: some models have no upper
    case, and no token for rare letters."""

    @property
    def size(self) -> int: ...

    @property
    def pieces(self) -> Sequence[bytes]: ...

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class EmbeddingCapabilities:
    dimension: int
    """Numbers of a vector. A model that ranks has one number instead: a logit."""
    context: int
    """Longest input in tokens, with the special ones around it."""
    pooling: Pooling
    batch: int
    """Tokens that one `embed` should be given together. A longer input is given alone."""
    sequences: int
    """Most inputs that one `embed` takes."""


@dataclass(frozen=True, slots=True)
class TokenInput:
    ids: tuple[int, ...]
    second: int | None = None
    """Where the second text of a pair begins."""
    tail: int = 0
    """How many special tokens end it: they stay when it is cut."""

    def cut(self, length: int) -> TokenInput:
        """The beginning of it that has `length` tokens with its tail."""
        if len(self.ids) <= length:
            return self
        ids = self.ids[: length - self.tail] + self.ids[len(self.ids) - self.tail :]
        return replace(self, ids=ids, second=None if self.second is None else min(self.second, length))


@dataclass(frozen=True, slots=True)
class Framing:
    """What a model wants around a text, and around and between the two texts of a pair."""

    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    template: tuple[str, str, str] | None = None
    """Texts of a pair's frame: before the query, between query and document, and after the document."""

    def text(self, vocab: TextVocab, text: str) -> TokenInput:
        """Control tokens in a text are text."""
        return TokenInput(
            (*self.head, *vocab.tokenize(text, parse_special=False), *self.tail), tail=len(self.tail)
        )

    def pair(self, vocab: TextVocab, query: str, document: str) -> TokenInput:
        if self.template is not None:
            return _from_template(vocab, self.template, query, document)
        first = (*self.head, *vocab.tokenize(query, parse_special=False), *self.middle)
        second = (*vocab.tokenize(document, parse_special=False), *self.tail)
        return TokenInput(first + second, second=len(first), tail=len(self.tail))


def _from_template(vocab: TextVocab, template: tuple[str, str, str], query: str, document: str) -> TokenInput:
    """The template's own control tokens are looked for, and those of the texts are not."""
    before, between, after = template
    end = vocab.tokenize(after)
    ids = (
        *vocab.tokenize(before),
        *vocab.tokenize(query, parse_special=False),
        *vocab.tokenize(between),
        *vocab.tokenize(document, parse_special=False),
        *end,
    )
    return TokenInput(ids, tail=len(end))


class EmbeddingEngine(Protocol):
    @property
    def capabilities(self) -> EmbeddingCapabilities: ...

    @property
    def vocab(self) -> TextVocab: ...

    @property
    def framing(self) -> Framing: ...

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that change whenever anything that shapes vectors changes."""

    def embed(self, inputs: Sequence[TokenInput]) -> Vectors:
        """The vectors of these inputs, none of which is empty or longer than the context. Blocks for one step.

        As the model computes them: of any length. They do not depend on what else is in the batch, but for
        rounding. Raises EngineError; the engine can be used again then.
        """

    def close(self) -> None:
        """Release everything. Calling it twice is harmless."""
