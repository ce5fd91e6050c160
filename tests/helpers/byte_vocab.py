"""A byte-level vocabulary with a few words, enough to be awkward: words overlap, characters can be split."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
