"""Prompt text to token ids, without tokenising a long history again on every turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

from emberkeep.text import alternatives
from emberkeep.types import Vocab

Replay = Callable[[Sequence[int], bytes, int, Set[int]], tuple[tuple[int, ...], int]]
"""(ids before, the whole text, a start, borders) to the ids that were really sampled for the text from that start,
and where it ends, one of the borders; ((), start) if nothing is known.

The ids before are the list being built: read it, do not keep it. The text may begin with the template's own
words (ChatML: `assistant`, a line break, `Hello`), which the answer has to cover as well.
"""

SEAM = "\ufdd0"
"""A character that Unicode keeps for programs' own use: no token goes over it, and it has none itself."""

_REMEMBERED_CHARS = 8 << 20
_LONG_CHARS = 1 << 15


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

    def offset_of(self, position: int, text_of: Callable[[Sequence[int]], str]) -> int:
        """About where in the text the token at `position` begins."""
        at, start = max((end for end in self.ends if end[1] <= position), key=lambda end: end[1], default=(0, 0))
        return at + len(text_of(self.ids[start:position]))


class PromptTokenizer:
    """Safe to use from several threads."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._border = alternatives([SEAM, *(vocab.specials if vocab.splits_at_specials else ())])
        self._known = _Fragments(_REMEMBERED_CHARS)
        # Some vocabularies put a blank before every stretch of text.
        first = vocab.tokenize("a")[:1]
        self._longest_piece = max(map(len, vocab.pieces), default=1) or 1
        self._blank = b" " if first and vocab.pieces[first[0]].startswith(b" ") else b""

    def fewest(self, text: str) -> int:
        """`text` has no fewer tokens. Takes milliseconds for a million characters."""
        assert self._border is not None
        specials = sum(1 for _ in self._border.finditer(text)) if len(text) > _LONG_CHARS else 0
        return max(len(text) // self._longest_piece, specials)

    def encode(self, text: str, *, replay: Replay | None = None, before: Sequence[int] = ()) -> list[int]:
        """`before` and the token ids of `text`; `replay` is asked at every stretch between special tokens.

        Blocks; mutates nothing but the memory of fragments.
        """
        return self.tokenize(text, replay=replay, before=before).ids

    def tokenize(self, text: str, *, replay: Replay | None = None, before: Sequence[int] = ()) -> TokenizedText:
        """As `encode`, with where each stretch of `text` ends."""
        fragments = list(self._fragments(text))
        parts = [self._bytes_of(*fragment) for fragment in fragments]
        ends = list(accumulate(len(part) for part in parts))
        data, borders = b"".join(parts), frozenset(ends)
        tokenized = TokenizedText(list(before), [(0, len(before))])
        covered, at = 0, 0
        for (fragment, special), begin, end in zip(fragments, [0, *ends], ends, strict=False):
            at += len(fragment)
            if begin < covered:
                tokenized.skip_to(at, end == covered)
                continue
            if special is not None or fragment == SEAM:
                tokenized.add(() if special is None else (special,), at)
                continue
            replayed, covered = replay(tokenized.ids, data, begin, borders) if replay else ((), begin)
            tokenized.add(replayed or self._ids_of(fragment), at, is_whole=covered <= end)
        return tokenized

    def _bytes_of(self, fragment: str, special: int | None) -> bytes:
        """The bytes that its tokens stand for. A seam's own are there so that nothing is replayed over it."""
        data = fragment.encode("utf-8", "surrogatepass")
        return data if special is not None or fragment == SEAM else self._blank + data

    def _fragments(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Text fragments and seams (with None) and special tokens (with their id), in order."""
        assert self._border is not None
        start = 0
        for match in self._border.finditer(text):
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

    def put(self, fragment: str, ids: tuple[int, ...]) -> None:
        with self._lock:
            if fragment in self._ids or len(fragment) > self._max_chars:
                return
            self._ids[fragment] = ids
            self._room -= len(fragment)
            while self._room < 0:
                oldest, _ = self._ids.popitem(last=False)
                self._room += len(oldest)
