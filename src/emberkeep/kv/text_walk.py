"""Ids by their text: a prompt that is still text is followed through the tree."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache

import numpy as np

from emberkeep.kv.tree import Chunk, Cursor
from emberkeep.text import common_start
from emberkeep.token_arrays import TokenArray

Replayed = tuple[tuple[int, ...], int]
"""Ids, and where their text ends."""


def stored_ids(
    cursor: Cursor,
    text: bytes,
    start: int,
    borders: Set[int],
    pieces: Sequence[bytes],
    specials: Set[int] = frozenset(),
) -> Replayed:
    """Ids stored after `cursor` for `text` from `start` to one of `borders`, or ((), start).

    Sampled ones first. A template's own words may stand before the answer (in ChatML the role), up to the first
    border. What was sampled may go on over borders, because a model can write a special token's text in
    ordinary tokens. Of several ways the one with the most sampled tokens wins: when a crash has left only the
    beginning of an answer, the tokenizer's ids of the same text branch off from it.

    Else the tokenizer's own: up to the first border, when a token of `specials` follows there in the tree too.
    Such a token is where the tokenizer begins anew, so it was asked for exactly this text.
    """
    best: tuple[Chunk, int, int] | None = None
    most = 0
    ends = in_order(frozenset(borders))
    first_border = next_border(ends, start)
    todo: list[tuple[Chunk, int, int, int]] = [(cursor.chunk, cursor.used, start, 0)]
    while todo:
        chunk, index, offset, sampled = todo.pop()
        while True:
            is_first = offset == first_border and not best and not chunk.is_given and index < len(chunk.tokens)
            is_whole = is_first and int(chunk.tokens[index]) in specials
            if (offset in borders and sampled > most) or is_whole:
                best, most = (chunk, index, offset), sampled
            for first, group in chunk.branches.get(index, {}).items():
                if offset == first_border or (
                    first in range(len(pieces)) and text.startswith(pieces[first], offset)
                ):
                    todo += ((child, 0, offset, sampled) for child in group if cursor.sees(child))
            if index == len(chunk.tokens):
                break
            stop, is_sampled = _run(chunk, index)
            if not is_sampled and (sampled or offset >= first_border):
                break
            room = next_border(ends, offset) - offset
            written = _written(chunk, index, stop, pieces)
            if len(written) > room:
                stop = index + max(_fitting(chunk.tokens[index:stop], room, pieces), int(is_sampled))
                written = _written(chunk, index, stop, pieces)
            if not written or not text.startswith(written, offset):
                break
            sampled += (stop - index) * is_sampled
            offset, index = offset + len(written), stop
    return (_ids_between(cursor, *best[:2]), best[2]) if best else ((), start)


@lru_cache(maxsize=8)
def in_order(borders: frozenset[int]) -> tuple[int, ...]:
    """Asked for at every stretch of a prompt, and there may be as many of these as messages."""
    return tuple(sorted(borders))


def next_border(ends: tuple[int, ...], offset: int) -> int:
    """The first of `ends` after `offset`; where there is none, `offset`."""
    at = bisect_right(ends, offset)
    return ends[at] if at < len(ends) else offset


def _run(chunk: Chunk, index: int) -> tuple[int, bool]:
    """The end of what can be compared at once from `index` on, and whether it was sampled: that is all up to the
    next branch, the next token that was sampled (or was not), or the end."""
    stop, is_sampled = len(chunk.tokens), False
    for take in chunk.branches:
        if index < take < stop:
            stop = take
    for begin, end in chunk.sampled:
        if begin <= index < end:
            stop, is_sampled = min(stop, end), True
        elif index < begin:
            stop = min(stop, begin)
    return stop, is_sampled


def _fitting(tokens: TokenArray, room: int, pieces: Sequence[bytes]) -> int:
    """How many of these have a text of no more than `room` bytes together."""
    for count, token in enumerate(tokens.tolist()):
        room -= len(pieces[token])
        if room < 0:
            return count
    return len(tokens)


def _written(chunk: Chunk, index: int, stop: int, pieces: Sequence[bytes]) -> bytes:
    """The text of these tokens. Empty at the end, and for those of a foreign file, which no prompt of this model
    has."""
    is_all = stop - index == len(chunk.tokens)
    if is_all and chunk.text is not None:
        return chunk.text
    tokens = chunk.tokens[index:stop].tolist()
    is_foreign = max(tokens, default=0) >= len(pieces)
    written = b"" if is_foreign else b"".join([pieces[token] for token in tokens])
    if is_all:
        chunk.text = written
    return written


def _ids_between(cursor: Cursor, chunk: Chunk, index: int) -> tuple[int, ...]:
    """Those on the way from `cursor` to `index` of `chunk`, which is at or below its chunk."""
    parts: list[TokenArray] = []
    while chunk is not cursor.chunk and chunk.parent is not None:
        parts.append(chunk.tokens[:index])
        chunk, index = chunk.parent, chunk.take
    parts.append(chunk.tokens[cursor.used : index])
    return tuple(np.concatenate(parts[::-1]).tolist())


def chunks_along(origin: Cursor, text: bytes, pieces: Sequence[bytes]) -> list[Chunk]:
    """Chunks below `origin`, a root, whose text lies along the beginning of `text`: what a lookup of its tokens
    will most likely want.

    Only a guess made before the text is tokenised, a whole chunk per comparison.
    """
    found = []
    todo = [(origin.chunk, 0)]
    while todo:
        chunk, offset = todo.pop()
        for take, by_first in chunk.branches.items():
            begin = offset + len(_written(chunk, 0, take, pieces))
            for child in _followers(by_first, text, begin, pieces):
                if origin.sees(child) and (written := _written(child, 0, len(child.tokens), pieces)):
                    found.append(child)
                    if text.startswith(written, begin):
                        todo.append((child, begin))
    return found


def _followers(
    by_first: Mapping[int, Sequence[Chunk]], text: bytes, begin: int, pieces: Sequence[bytes]
) -> Sequence[Chunk]:
    """Those of which the first token stands in `text` at `begin`."""
    known = range(len(pieces))
    groups = [g for first, g in by_first.items() if first in known and text.startswith(pieces[first], begin)]
    return groups[0] if len(groups) == 1 else [child for group in groups for child in group]


def ids_along(cursor: Cursor, text: bytes, start: int, stop: int, pieces: Sequence[bytes]) -> Replayed:
    """The ids stored after `cursor` that say the most of `text[start:stop]`, as it begins, and where that ends.

    Sampled ones are among them, and ids that the tokenizer has made of a longer text, where other text followed.
    """
    best, todo = (cursor.chunk, cursor.used, start), [(cursor.chunk, cursor.used, start)]
    while todo:
        chunk, index, offset = todo.pop()
        end = len(chunk.tokens)
        written = b"" if chunk.is_given else _written(chunk, index, end, pieces)
        reached = offset + len(written)
        if not written or reached > stop or not text.startswith(written, offset):
            same = common_start(written, text[offset : min(stop, reached)])
            end = index + _fitting(chunk.tokens[index:], same, pieces) if written else index
            reached = offset + len(_written(chunk, index, end, pieces))
        if reached > best[2]:
            best = chunk, end, reached
        for take, by_first in chunk.branches.items():
            if not index <= take <= end:
                continue
            begin = reached if take == end else offset + len(_written(chunk, index, take, pieces))
            todo += [
                (child, 0, begin) for child in _followers(by_first, text, begin, pieces) if cursor.sees(child)
            ]
    return _ids_between(cursor, *best[:2]), best[2]
