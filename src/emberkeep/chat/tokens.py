"""Prompt text to token ids, without tokenising a long history again on every turn."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import accumulate

from emberkeep.types import Vocab

Replay = Callable[[Sequence[int], bytes, int, Set[int]], tuple[tuple[int, ...], int]]
"""(ids before, the whole text, a start, borders) to the ids that were really sampled for the text from that start,
and where it ends, one of the borders; ((), start) if nothing is known.

The ids before are the list being built: read it, do not keep it. The text may begin with the template's own
words (ChatML: `assistant`, a line break, `Hello`), which the answer has to cover as well.
"""

_REMEMBERED_CHARS = 8 << 20


class PromptTokenizer:
    """Safe to use from several threads."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._border = _border(vocab)
        self._known = _Fragments(_REMEMBERED_CHARS)

    def encode(self, text: str, *, replay: Replay | None = None, before: Sequence[int] = ()) -> list[int]:
        """`before` and the token ids of `text`; `replay` is asked at every stretch between special tokens.

        Blocks; mutates nothing but the memory of fragments.
        """
        ids = list(before)
        fragments = list(self._fragments(text))
        sizes = (len(fragment.encode("utf-8", "surrogatepass")) for fragment, _ in fragments)
        ends = list(accumulate(sizes))
        data, borders = text.encode("utf-8", "surrogatepass"), frozenset(ends)
        covered = 0
        for (fragment, special), begin in zip(fragments, [0, *ends], strict=False):
            if begin < covered:
                continue
            if special is not None:
                ids.append(special)
                continue
            replayed, covered = replay(ids, data, begin, borders) if replay else ((), begin)
            ids += replayed or self._tokenize(fragment)
        return ids

    def _fragments(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Text fragments (with None) and special tokens (with their id), in order."""
        if not self._vocab.splits_at_specials or self._border is None:
            yield text, None
            return
        start = 0
        for match in self._border.finditer(text):
            if match.start() > start:
                yield text[start : match.start()], None
            yield match[0], self._vocab.specials[match[0]]
            start = match.end()
        if start < len(text):
            yield text[start:], None

    def _tokenize(self, fragment: str) -> tuple[int, ...]:
        known = self._known.get(fragment)
        if known is None:
            known = tuple(self._vocab.tokenize(fragment))
            self._known.put(fragment, known)
        return known


def _border(vocab: Vocab) -> re.Pattern[str] | None:
    texts = sorted((text for text in vocab.specials if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


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
