"""TensorRT-LLM's KV blocks, as its events tell of them: which are there, and which tokens each of them holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Key = tuple[int, int | str]
"""The rank that holds a block, and the block's hash."""

_MOST = 1_000_000
"""More than a server has; only events that went missing lead there."""


@dataclass(frozen=True, slots=True)
class Block:
    key: Key
    parent: Key | None
    start: int
    end: int
    """Its tokens, counted from the beginning of the prompt."""
    order: int
    """The how manieth it was that was stored."""


class BlockTree:
    """A block's hash covers everything before it, so that equal beginnings are the same blocks."""

    def __init__(self) -> None:
        self._blocks: dict[Key, Block] = {}  # in the order of storing
        self._children: Counter[Key] = Counter()
        self.stored = 0
        """How many have been stored so far."""
        self.block_tokens = 0
        """The most that one has held."""

    def is_followed(self, key: Key) -> bool:
        return self._children[key] > 0

    def store(self, parent: Key | None, blocks: Iterable[tuple[Key, int]]) -> None:
        """A chain of keys with their token counts. Where it hangs on is unknown if an event went missing: it is
        left out then."""
        if parent is not None and parent not in self._blocks:
            return
        for key, tokens in blocks:
            self._add(key, parent, tokens)
            parent = key
        while len(self._blocks) > _MOST:
            self.remove(next(iter(self._blocks)))

    def remove(self, key: Key) -> None:
        block = self._blocks.pop(key, None)
        if block is not None and block.parent is not None:
            self._children[block.parent] -= 1

    def clear(self) -> None:
        self._blocks.clear()
        self._children.clear()

    def ends(self, after: int) -> Iterator[Block]:
        """Blocks that no other follows, of those that were stored after the first so many."""
        for block in reversed(self._blocks.values()):
            if block.order <= after:
                return
            if not self.is_followed(block.key):
                yield block

    def path(self, end: Block) -> dict[Key, Block]:
        """From the first block to this one, as far back as they are there."""
        found: list[Block] = []
        block: Block | None = end
        while block is not None:
            found.append(block)
            block = self._blocks.get(block.parent) if block.parent is not None else None
        return {block.key: block for block in reversed(found)}

    def _add(self, key: Key, parent: Key | None, tokens: int) -> None:
        if key in self._blocks:
            return
        start = self._blocks[parent].end if parent is not None else 0
        self.stored += 1
        self.block_tokens = max(self.block_tokens, tokens)
        self._blocks[key] = Block(key, parent, start, start + tokens, self.stored)
        if parent is not None:
            self._children[parent] += 1
