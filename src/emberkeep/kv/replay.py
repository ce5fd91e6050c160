"""Sampled tokens found again by their text.

A model does not always spell a text the way the tokenizer would. When a client sends an assistant's text back,
the ids that were really sampled must be used, or the stored state behind them is lost. They are in the
tree: this walks it by the bytes of its tokens instead of by their ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from emberkeep.kv.tree import Chunk, Cursor, Span


def sampled_spelling(cursor: Cursor, fragment: bytes, pieces: Sequence[bytes]) -> tuple[int, ...]:
    """Stored ids after `cursor` that spell exactly `fragment`, the most of them sampled; () if none were.

    There may be several: when a crash has left only the beginning of an answer, the tokenizer's spelling of
    the same text branches off from it, and the answer may be sampled again later.
    """
    best: tuple[int, ...] = ()
    most = 0
    todo: list[tuple[Chunk, int, int, tuple[int, ...], int]] = [(cursor.chunk, cursor.used, 0, (), 0)]
    while todo:
        chunk, used, offset, path, sampled = todo.pop()
        spelled: list[int] = []
        for index in range(used, len(chunk.tokens) + 1):
            for group in chunk.branches.get(index, {}).values():
                todo += ((child, 0, offset, path + tuple(spelled), sampled) for child in group)
            if offset == len(fragment) or index == len(chunk.tokens):
                break
            token = int(chunk.tokens[index])
            piece = pieces[token] if token < len(pieces) else b""
            if not piece or not fragment.startswith(piece, offset):
                break
            spelled.append(token)
            offset += len(piece)
            sampled += _covers(chunk.sampled, index)
        if offset == len(fragment) and sampled > most:
            best, most = path + tuple(spelled), sampled
    return best


def spelled_chunks(root: Chunk, text: bytes, pieces: Sequence[bytes]) -> list[Chunk]:
    """Chunks whose text lies along the beginning of `text`: what a lookup of its tokens will most likely want.

    Only a guess made before the text is tokenised, a whole chunk per comparison.
    """
    found = []
    todo = [(root, 0)]
    while todo:
        chunk, offset = todo.pop()
        for take, by_first in chunk.branches.items():
            begin = offset + sum(len(pieces[t]) for t in chunk.tokens[:take].tolist())
            for child in (child for group in by_first.values() for child in group):
                if child.tokens.max() >= len(pieces):
                    continue  # a foreign file: no prompt of this model has such tokens
                first = pieces[int(child.tokens[0])]
                if text.startswith(first, begin):
                    found.append(child)
                    if text.startswith(b"".join([pieces[t] for t in child.tokens.tolist()]), begin):
                        todo.append((child, begin))
    return found


def _covers(spans: tuple[Span, ...], index: int) -> bool:
    return any(begin <= index < end for begin, end in spans)
