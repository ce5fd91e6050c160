"""Token ids found again by their text.

A model does not always sample the ids that the tokenizer would make of the same text. When a client sends an
assistant's text back, the ids that were really sampled must be used, or the stored state behind them is lost. They
are in the tree: this walks it by the bytes of its tokens instead of by their ids. What was once tokenized is there
as well, and comparing bytes is many times quicker than tokenizing.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from emberkeep.kv.tree import Chunk, Cursor

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
    best: Replayed = (), start
    most = 0
    first_border = min((border for border in borders if border > start), default=start)
    todo: list[tuple[Chunk, int, int, tuple[int, ...], int]] = [(cursor.chunk, cursor.used, start, (), 0)]
    while todo:
        chunk, index, offset, path, sampled = todo.pop()
        ids = list(path)
        while True:
            is_whole = offset == first_border and not best[0] and _begins_anew(chunk, index, specials)
            if (offset in borders and sampled > most) or is_whole:
                best, most = (tuple(ids), offset), sampled
            for group in chunk.branches.get(index, {}).values():
                todo += ((child, 0, offset, tuple(ids), sampled) for child in group if cursor.sees(child))
            stop, is_sampled = _run(chunk, index, specials)
            run = chunk.tokens[index:stop].tolist()
            if max(run, default=len(pieces)) >= len(pieces):
                break  # the end, or a foreign file: no prompt of this model has such tokens
            written = b"".join([pieces[token] for token in run])
            is_theirs = not sampled and offset + len(written) <= first_border
            if not written or not (is_sampled or is_theirs) or not text.startswith(written, offset):
                break
            ids += run
            offset, index, sampled = offset + len(written), stop, sampled + len(run) * is_sampled
    return best


def _begins_anew(chunk: Chunk, index: int, specials: Set[int]) -> bool:
    return not chunk.given and index < len(chunk.tokens) and int(chunk.tokens[index]) in specials


def _run(chunk: Chunk, index: int, specials: Set[int]) -> tuple[int, bool]:
    """The end of what can be compared at once from `index` on, and whether it was sampled.

    That is one sampled token, or everything up to the next sampled or special token, branch, or the end.
    """
    for begin, end in chunk.sampled:
        if begin <= index < end:
            return index + 1, True
    marks = (len(chunk.tokens), *chunk.branches, *(begin for begin, _ in chunk.sampled))
    stop = min((mark for mark in marks if mark > index), default=index)
    if not specials:
        return stop, False
    rest = chunk.tokens[index + 1 : stop].tolist()
    return next((index + 1 + i for i, token in enumerate(rest) if token in specials), stop), False


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
            begin = offset + sum(len(pieces[t]) for t in chunk.tokens[:take].tolist())
            for child in (child for group in by_first.values() for child in group):
                if child.is_snapshot or not origin.sees(child):
                    continue
                if child.tokens.max() >= len(pieces):
                    continue  # a foreign file: no prompt of this model has such tokens
                first = pieces[int(child.tokens[0])]
                if text.startswith(first, begin):
                    found.append(child)
                    if text.startswith(b"".join([pieces[t] for t in child.tokens.tolist()]), begin):
                        todo.append((child, begin))
    return found
