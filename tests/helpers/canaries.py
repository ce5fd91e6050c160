"""Users whose every word and token can be looked for in bytes."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from emberkeep.kv.policy import CHUNK_TOKENS
from emberkeep.kv.store import KvStore
from emberkeep.token_arrays import TokenArray
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.lineage import Lineage, private_namespace
from helpers.kv_building import exported, prompt

TOKENS = 420
_WINDOW = 6
"""Tokens in a row that no other user has."""
_HEAD = 8
"""Bytes, which every trace has."""


@dataclass(frozen=True)
class Canary:
    """One user with one conversation."""

    number: int

    @property
    def user(self) -> str:
        return f"canary{self.number}x"

    @property
    def namespace(self) -> str:
        return private_namespace(self.user)

    @cached_property
    def tokens(self) -> TokenArray:
        return prompt(TOKENS, seed=1000 + self.number)

    @cached_property
    def payload(self) -> memoryview:
        return exported(self.tokens, 0, TOKENS)

    @property
    def label(self) -> Label:
        return Label(EntryKind.CONVERSATION, f"key-{self.user}", f"head of {self.user}", None, f"name {self.user}")

    @cached_property
    def traces(self) -> list[bytes]:
        """Whatever of them could be in a file: the name, tokens as ids and as text, state."""
        starts = range(0, TOKENS - _WINDOW, 3)
        ids = [self.tokens[at : at + _WINDOW].astype("<i4").tobytes() for at in starts]
        texts = [bytes(self.tokens[at : at + 2 * _WINDOW].astype(np.uint8)) for at in starts]
        cell = len(self.payload) // TOKENS
        states = [bytes(self.payload[at * cell : (at + _WINDOW) * cell]) for at in starts]
        return [self.user.encode(), *ids, *texts, *states]

    def is_in(self, data: bytes) -> bool:
        """Whether any of the traces is. How they begin is looked for first, all at once: few files have any."""
        if len(data) < _HEAD:
            return False
        parts = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), _HEAD)
        has_head = np.isin(np.ascontiguousarray(parts).view(np.uint64), self._heads).any()
        return bool(has_head) and any(trace in data for trace in self.traces)

    @cached_property
    def _heads(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(b"".join(trace[:_HEAD] for trace in self.traces), np.uint64)

    def keep(self, store: KvStore, length: int) -> None:
        """What a request does that has computed so many tokens."""
        lineage, tokens, before = Lineage(self.namespace), self.tokens[:length], -1
        cursor = store.origin(lineage)
        store.corpus.path(lineage, tokens, 0)
        cell = len(self.payload) // TOKENS
        while before < (cursor := store.advance(cursor, tokens)).position < length:
            before = cursor.position
            begin = store.growth_point(cursor)
            end = min(begin.position + CHUNK_TOKENS, length)
            part = self.payload[begin.position * cell : end * cell]
            cursor = store.insert(begin, tokens[begin.position : end], part, ((0, 3),), fork=False)
        store.turn_ended(self.label, cursor)
        store.corpus.add(lineage, tokens, 0)


def found_in(folder: Path, canary: Canary) -> list[str]:
    """Files below `folder` with anything of theirs, in their names too."""
    found = []
    for path in sorted(folder.rglob("*")):
        is_named = canary.user in path.name
        if is_named or (path.is_file() and canary.is_in(_bytes_of(path))):
            found.append(str(path.relative_to(folder)))
    return found


def _bytes_of(path: Path) -> bytes:
    """Read by another process where SQLite has it open: closing a file lets go of the locks that we have on it."""
    if path.name.startswith("index.db"):
        return subprocess.run(["cat", str(path)], capture_output=True, check=False).stdout
    return path.read_bytes()
