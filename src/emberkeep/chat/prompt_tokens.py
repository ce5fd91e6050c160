"""Text to token ids, without tokenizing a long history again on every turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import accumulate

import numpy as np

from emberkeep.chat.seams import SeamedText
from emberkeep.text import alternatives
from emberkeep.token_arrays import TokenArray
from emberkeep.types.models import Vocab
from emberkeep.values import dataclass

_REMEMBERED_CHARS = 8 << 20
_LONG_CHARS = 1 << 15

Replay = Callable[[Sequence[int], bytes, int, Set[int]], tuple[tuple[int, ...], int]]
"""(ids before, a text between two seams, a start, borders) to the ids that were really sampled for the text from
that start, and where it ends, one of the borders; ((), start) if nothing is known.

The ids before are the list being built: read it, do not keep it. The text may begin with the template's own
words (ChatML: `assistant`, a line break, `Hello`), which the answer has to cover as well.
"""


@dataclass(slots=True)
class TokenizedText:
    """A text as tokens."""

    ids: list[int]
    ends: list[tuple[int, int]]
    """Places, in characters of the text and in tokens, where one ends and the other does too."""
    is_given: bool = False
    """The ids came from a client, or are the end of something: the tokenizer may make others of the text."""

    def add(self, ids: Sequence[int], at: int, *, is_whole: bool = True) -> None:
        """Tokens for the text up to `at`, or (not `is_whole`) beyond it."""
        self.ids += ids
        if is_whole:
            self.ends.append((at, len(self.ids)))

    def skip_to(self, at: int, is_end: bool) -> None:
        """The text up to `at` has its tokens already; they end there or beyond."""
        if is_end:
            self.ends.append((at, len(self.ids)))

    def as_array(self) -> TokenArray:
        return np.array(self.ids, np.int32)

    def offset_of(self, position: int, text_of: Callable[[Sequence[int]], str]) -> int:
        """About where in the text the token at `position` begins."""
        at, start = max((end for end in self.ends if end[1] <= position), key=lambda end: end[1], default=(0, 0))
        return at + len(text_of(self.ids[start:position]))

    def position_at(self, text: str, offset: int, pieces: Sequence[bytes]) -> int:
        """How many tokens lie wholly within the first `offset` characters of `text`, whose tokens these are."""
        at, position = max((end for end in self.ends if end[0] <= offset), default=(0, 0))
        room = len(text[at:offset].encode("utf-8", "surrogatepass"))
        for token in self.ids[position:] if room else ():
            room -= len(pieces[token])
            if room < 0:
                break
            position += 1
        return position


class PromptTokenizer:
    """Safe to use from several threads."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._border = alternatives(vocab.specials if vocab.splits_at_specials else ())
        self._known = _Fragments(_REMEMBERED_CHARS)
        # Some vocabularies put a blank before every stretch of text.
        first = vocab.tokenize("a")[:1]
        self._longest_piece = max(map(len, vocab.pieces), default=1) or 1
        self._blank = b" " if first and vocab.pieces[first[0]].startswith(b" ") else b""

    def forget_texts(self) -> None:
        self._known.clear()

    def fewest(self, text: str) -> int:
        """`text` has no fewer tokens. Takes milliseconds for a million characters."""
        specials = 0
        if self._border is not None and len(text) > _LONG_CHARS:
            specials = sum(1 for _ in self._border.finditer(text))
        return max(len(text) // self._longest_piece, specials)

    def encode(self, text: str, *, replay: Replay | None = None, before: Sequence[int] = ()) -> list[int]:
        """`before` and the token ids of `text`; `replay` is asked at every stretch between special tokens.

        Blocks; mutates nothing but the memory of fragments.
        """
        return self.tokenize(SeamedText(text), replay=replay, before=before).ids

    def tokenize(
        self, written: SeamedText, *, replay: Replay | None = None, before: Sequence[int] = ()
    ) -> TokenizedText:
        """As `encode`, with where each stretch of the text ends."""
        tokenized = TokenizedText(list(before), [(0, len(before))])
        at = 0
        for part in written.parts:
            self._add(part, at, tokenized, replay)
            at += len(part)
        return tokenized

    def _add(self, part: str, at: int, tokenized: TokenizedText, replay: Replay | None) -> None:
        """The tokens of what stands at `at` between two seams. Nothing that is replayed goes beyond its end."""
        fragments = list(self._fragments(part))
        encoded = [self._bytes_of(*fragment) for fragment in fragments]
        ends = list(accumulate(map(len, encoded)))
        data, borders = b"".join(encoded), frozenset(ends)
        covered = 0
        for (fragment, special), begin, end in zip(fragments, [0, *ends], ends, strict=False):
            at += len(fragment)
            if begin < covered:
                tokenized.skip_to(at, end == covered)
                continue
            if special is not None:
                tokenized.add((special,), at)
                continue
            replayed, covered = replay(tokenized.ids, data, begin, borders) if replay else ((), begin)
            tokenized.add(replayed or self._ids_of(fragment), at, is_whole=covered <= end)

    def _bytes_of(self, fragment: str, special: int | None) -> bytes:
        """The bytes that its tokens stand for."""
        data = fragment.encode("utf-8", "surrogatepass")
        return data if special is not None else self._blank + data

    def _fragments(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Text fragments (with None) and special tokens (with their id), in order."""
        start = 0
        for match in self._border.finditer(text) if self._border is not None else ():
            if match.start() > start:
                yield text[start : match.start()], None
            yield match[0], self._vocab.specials.get(match[0])
            start = match.end()
        if start < len(text):
            yield text[start:], None

    def _ids_of(self, fragment: str) -> tuple[int, ...]:
        known = self._known.get(fragment)
        if known is None:
            known = tuple(self._vocab.tokenize(fragment))
            self._known.put(fragment, known)
        return known


class _Fragments:
    """The most recently used tokenisations, bounded by the characters they stand for."""

    def __init__(self, max_chars: int) -> None:
        self._room = max_chars
        self._max_chars = max_chars
        self._ids: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, fragment: str) -> tuple[int, ...] | None:
        with self._lock:
            ids = self._ids.get(fragment)
            if ids is not None:
                self._ids.move_to_end(fragment)
            return ids

    def clear(self) -> None:
        with self._lock:
            self._ids.clear()
            self._room = self._max_chars

    def put(self, fragment: str, ids: tuple[int, ...]) -> None:
        with self._lock:
            if fragment in self._ids or len(fragment) > self._max_chars:
                return
            self._ids[fragment] = ids
            self._room -= len(fragment)
            while self._room < 0:
                oldest, _ = self._ids.popitem(last=False)
                self._room += len(oldest)
