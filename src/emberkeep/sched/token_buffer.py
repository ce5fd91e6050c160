"""The token ids of one sequence."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from emberkeep.token_arrays import TokenArray


class TokenBuffer:
    """Token ids that only grow or are cut, always visible as one array."""

    def __init__(self, tokens: TokenArray, room: int) -> None:
        self._data = np.empty(len(tokens) + room, np.int32)
        self._data[: len(tokens)] = tokens
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> TokenArray:
        return self._data[: self._length][part]

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self._length == len(self._data):
                self._data = np.concatenate([self._data, np.empty(max(64, self._length), np.int32)])
            self._data[self._length] = token
            self._length += 1

    def cut(self, length: int) -> None:
        self._length = min(self._length, length)
