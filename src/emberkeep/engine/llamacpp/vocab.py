"""A llama.cpp vocabulary as an immutable value: pieces, specials, and tokenisation."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property

from emberkeep.engine.llamacpp import api
from emberkeep.engine.llamacpp.api import Handle
from emberkeep.engine.llamacpp.shared_library import llama

_STRIPS = api.TOKEN_LSTRIP | api.TOKEN_RSTRIP
_UNSEEN = api.TOKEN_CONTROL | api.TOKEN_UNKNOWN
_WHOLE = _UNSEEN | api.TOKEN_USER_DEFINED


class LlamaVocab:
    """`handle` belongs to the model, which must outlive this object."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self.size: int = llama().llama_vocab_n_tokens(handle)
        self._attrs = [int(llama().llama_vocab_get_attr(handle, i)) for i in range(self.size)]
        self.pieces: Sequence[bytes] = _read_pieces(handle, self.size)
        self.eog = frozenset(i for i in range(self.size) if llama().llama_vocab_is_eog(handle, i))
        self.controls = frozenset(i for i, attr in enumerate(self._attrs) if attr & _UNSEEN)
        self.bos = _token_or_none(llama().llama_vocab_bos(handle))
        self.eos = _token_or_none(llama().llama_vocab_eos(handle))
        self.adds_bos = bool(llama().llama_vocab_get_add_bos(handle))

    @cached_property
    def specials(self) -> Mapping[str, int]:
        return {
            self.pieces[i].decode("utf-8", "replace"): i
            for i, attr in enumerate(self._attrs)
            if attr & _WHOLE and self.pieces[i]
        }

    @cached_property
    def splits_at_specials(self) -> bool:
        # A special token that eats the blanks around it couples the fragments on its two sides.
        return not any(attr & _WHOLE and attr & _STRIPS for attr in self._attrs)

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        data = text.encode("utf-8", "surrogatepass")
        # A token is at least one byte, but a vocabulary may put a blank before the text.
        room = len(data) + 8
        buffer = (ctypes.c_int32 * room)()
        count = llama().llama_tokenize(self._handle, data, len(data), buffer, room, False, parse_special)
        if count < 0:
            buffer = (ctypes.c_int32 * -count)()
            count = llama().llama_tokenize(self._handle, data, len(data), buffer, -count, False, parse_special)
        return buffer[:count]


def _token_or_none(token: int) -> int | None:
    return token if token >= 0 else None


def _read_pieces(handle: Handle, size: int) -> tuple[bytes, ...]:
    buffer = ctypes.create_string_buffer(1 << 14)
    pieces = []
    for token in range(size):
        length = llama().llama_token_to_piece(handle, token, buffer, len(buffer), 0, True)
        pieces.append(ctypes.string_at(buffer, max(length, 0)))
    return tuple(pieces)
