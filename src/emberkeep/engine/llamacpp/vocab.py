"""A llama.cpp vocabulary as an immutable value: pieces, specials, and tokenization.

Most of llama.cpp's pre-tokenizers are a `std::regex`, which matches by recursion: libstdc++ takes some 320
bytes of stack for every character of a match, and 25,000 letters in a row are more than a thread has. So long
texts are split first, and tokenized on a thread with a large stack.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np

from emberkeep.engine.facts import Facts
from emberkeep.engine.llamacpp import c_api
from emberkeep.engine.llamacpp.c_api import Handle
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.engine.text_splitter import MAX_MATCH, RUNS, Run, TextSplitter
from emberkeep.errors import EngineError, ModelBroken
from emberkeep.values import dataclass

_STRIPS = c_api.TOKEN_LSTRIP | c_api.TOKEN_RSTRIP
_UNSEEN = c_api.TOKEN_CONTROL | c_api.TOKEN_UNKNOWN
_WHOLE = _UNSEEN | c_api.TOKEN_USER_DEFINED

_MAX_CHARS = 1 << 28
"""The library counts bytes, up to four for a character, and tokens in 32 bits."""

_LEAD = "\n"
_BLANK = "▁"
"""What stands for a blank in the tokens of SentencePiece."""

_UNKNOWN_CHARS = 1 << 13
_UNKNOWN_RUN = 1 << 10
_SLICE = 1 << 16

T = TypeVar("T")

CALLER_CHARS = 512
"""What may be tokenized on any thread: some systems give them as little as 512 KiB of stack."""

SLOW_WITH_RUNS = frozenset({"deepseek-llm", "superbpe"})
r"""Pre-tokenizers that try to find the end of a run from all of it: `\s+$`, and `(?=(\d{3})+(?!\d))`."""

FOR_EMBEDDINGS = frozenset({"whitespace"})
"""Pre-tokenizers that leave blanks in what is merged, at two of which llama.cpp ends the process. Only embedding
models have them."""

_STACK_BYTES = MAX_MATCH * 2048
"""Six times of what a match was seen to take. Only as much as one really takes becomes memory."""

_starting = threading.Lock()


class LlamaVocab:
    """`handle` belongs to the model, which must not be freed before `close`; `pre` is its name for its
    pre-tokenizer. `may_rewrite`: the table by which a unigram vocabulary rewrites texts was checked. `facts`
    remember its tokens: asking for each of them takes a quarter of a second for 50,000.

    Raises ModelBroken for a vocabulary with which llama.cpp would end the process.
    """

    def __init__(
        self, handle: Handle, pre: str = "", *, may_rewrite: bool = False, facts: Facts | None = None
    ) -> None:
        self._handle = handle
        self._in_use = _Use()
        self._pre = pre
        self._kind: int = llama().llama_vocab_type(handle)
        _check_kind(self._kind, pre, may_rewrite)
        self.size: int = llama().llama_vocab_n_tokens(handle)
        known = _recall_tokens(handle, self.size, facts)
        tokens = known or _read_tokens(handle, self.size)
        self._attrs: Sequence[int] = tokens.attrs
        self.pieces: Sequence[bytes] = tokens.pieces
        self.eog = tokens.eog
        if known is None and not self._has_byte_tokens():
            raise ModelBroken(
                "The model's vocabulary has no tokens for single bytes, so it cannot tokenize every text: choose "
                "another file of this model, or another model."
            )
        if known is None and facts is not None:
            facts.remember(_TOKENS, tokens.to_bytes())
        self.controls = frozenset(i for i, attr in enumerate(self._attrs) if attr & _UNSEEN)
        self.bos = _token_or_none(llama().llama_vocab_bos(handle))
        self.eos = _token_or_none(llama().llama_vocab_eos(handle))
        self.adds_bos = bool(llama().llama_vocab_get_add_bos(handle))
        self.sep = _token_or_none(llama().llama_vocab_sep(handle))
        self.adds_eos = bool(llama().llama_vocab_get_add_eos(handle))
        self.adds_sep = bool(llama().llama_vocab_get_add_sep(handle))

    @property
    def is_wordpiece(self) -> bool:
        """As BERT has it."""
        return self._kind == c_api.VOCAB_WPM

    @property
    def is_unigram(self) -> bool:
        """As XLM-RoBERTa has it."""
        return self._kind == c_api.VOCAB_UGM

    def _has_byte_tokens(self) -> bool:
        """Whether what has no token can be tokenized by bytes: llama.cpp survives no byte that has none either."""
        if self._kind == c_api.VOCAB_SPM:
            texts = set(self._texts())
            return all(b"<0x%02X>" % byte in texts or bytes([byte]) in texts for byte in range(256))
        return self._kind != c_api.VOCAB_RWKV or {bytes([byte]) for byte in range(256)} <= set(self.pieces)

    def _texts(self) -> Iterator[bytes]:
        """The tokens as the vocabulary has them, which is what llama.cpp looks up."""
        return (llama().llama_vocab_get_text(self._handle, i) for i in range(self.size))

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

    def close(self) -> None:
        """Blocks while a text is being tokenized. Later ones are refused: their model is gone."""
        self._in_use.end()

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Raises EngineError for a text that is too long, and once the model was unloaded."""
        with self._in_use.entered():
            return self._tokenize(text, parse_special)

    def _tokenize(self, text: str, parse_special: bool) -> list[int]:
        if len(text) <= CALLER_CHARS:
            return self._tokenize_piece(text, parse_special)
        if len(text) > _MAX_CHARS:
            raise EngineError(f"A text of {len(text)} characters is too long to be tokenized: send less.")
        pieces = (self._splitter if parse_special else self._blind_splitter).pieces(text)
        return run_on_large_stack(lambda: self._tokenize_pieces(pieces, parse_special))

    @cached_property
    def _splitter(self) -> TextSplitter:
        return self._splitter_for(self.specials.keys())

    @cached_property
    def _blind_splitter(self) -> TextSplitter:
        """For texts in which control tokens are not looked for."""
        return self._splitter_for([text for text, token in self.specials.items() if token not in self.controls])

    def _splitter_for(self, specials: Collection[str]) -> TextSplitter:
        # The other kinds have no pre-tokenizer, and some put a blank before whatever is cut off.
        is_bpe = self._kind == c_api.VOCAB_BPE
        runs = RUNS if is_bpe and self._pre in SLOW_WITH_RUNS else ()
        return TextSplitter(specials, strips=not self.splits_at_specials, runs=runs, limits_matches=is_bpe)

    def _tokenize_pieces(self, pieces: Sequence[str], parse_special: bool) -> list[int]:
        # A long run gives the same piece many times, and the library compiles its patterns anew for every one.
        ids = {piece: self._tokenize_in_bytes(piece, parse_special) for piece in dict.fromkeys(pieces)}
        return [token for piece in pieces for token in ids[piece]]

    def _tokenize_in_bytes(self, text: str, parse_special: bool) -> list[int]:
        first, *rest = self._unknown_splitter.pieces(text) if len(text) > _UNKNOWN_CHARS else [text]
        ids = self._tokenize_piece(first, parse_special)
        # What begins a text gets a blank before it, so something else begins these.
        lead = self._tokenize_piece(_LEAD, parse_special) if rest else []
        for part in rest:
            ids += self._tokenize_piece(_LEAD + part, parse_special)[len(lead) :]
        return ids

    @cached_property
    def _unknown_splitter(self) -> TextSplitter:
        """Cuts runs of characters that have no token: at each of them llama.cpp copies all ids it has so far."""
        if self._kind != c_api.VOCAB_SPM:
            return TextSplitter()
        words = ((text, text.decode("utf-8", "ignore")) for text in self._texts())
        known = {word for text, word in words if len(word) == 1 and word.encode() == text} - {" "}
        if _BLANK in known:
            known.add(" ")
        unknown = f"[^{re.escape(''.join(sorted(known)))}]" if known else "(?s:.)"
        return TextSplitter(runs=[Run(re.compile(f"{unknown}{unknown}+"), _UNKNOWN_RUN)])

    def _tokenize_piece(self, text: str, parse_special: bool) -> list[int]:
        data = text.encode("utf-8", "surrogatepass")
        # A token is at least one byte, but a vocabulary may put a blank before the text.
        room = len(data) + 8
        buffer = (ctypes.c_int32 * room)()
        count = llama().llama_tokenize(self._handle, data, len(data), buffer, room, False, parse_special)
        if count < 0:
            buffer = (ctypes.c_int32 * -count)()
            count = llama().llama_tokenize(self._handle, data, len(data), buffer, -count, False, parse_special)
        ids: list[int] = []
        for start in range(
            0, count, _SLICE
        ):  # a slice of millions would hold the interpreter's lock for that long
            ids += buffer[start : min(start + _SLICE, count)]
        return ids


class _Use:
    """Counts calls into the library: memory that one of them reads is not to be freed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls = 0
        self._ended = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._changed:
            if self._ended:
                raise EngineError("The model was unloaded meanwhile: ask again.")
            self._calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: not self._calls)


def _check_kind(kind: int, pre: str, may_rewrite: bool) -> None:
    if kind == c_api.VOCAB_NONE:
        raise ModelBroken("The model file has no vocabulary: choose one that was made with its tokenizer.")
    # It may bring a table of its own for rewriting texts, and llama.cpp ends the process where that is wrong.
    if kind == c_api.VOCAB_UGM and not may_rewrite:
        raise ModelBroken(
            "The model's vocabulary is a unigram one, as T5 has it: choose a model that continues texts."
        )
    if kind == c_api.VOCAB_BPE and pre in FOR_EMBEDDINGS:
        raise ModelBroken(
            f"The model's vocabulary has the pre-tokenizer {pre!r}, which is for embeddings: choose a model that "
            "continues texts."
        )


def _token_or_none(token: int) -> int | None:
    return token if token >= 0 else None


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What the library says of each token."""

    pieces: tuple[bytes, ...]
    attrs: list[int]
    eog: frozenset[int]

    def to_bytes(self) -> bytes:
        """u32 tokens, u32 ends; i32 of each token's attributes, i32 of each end, u32 of each piece's length; then
        all pieces."""
        counts = np.array([len(self.pieces), len(self.eog)], "<u4")
        numbers = np.array([*self.attrs, *sorted(self.eog)], "<i4")
        lengths = np.array([len(piece) for piece in self.pieces], "<u4")
        return b"".join((counts.tobytes(), numbers.tobytes(), lengths.tobytes(), *self.pieces))

    @classmethod
    def from_bytes(cls, fact: bytes) -> _Tokens:
        """Raises ValueError."""
        size, ends = np.frombuffer(fact, "<u4", 2).tolist()
        attrs, eog = np.split(np.frombuffer(fact, "<i4", size + ends, offset=8), [size])
        begin = 8 + 4 * (size + ends)
        borders = np.cumsum(np.frombuffer(fact, "<u4", size, offset=begin), dtype=np.int64)
        borders = (begin + 4 * size + np.concatenate([[0], borders])).tolist()
        if borders[-1] != len(fact):
            raise ValueError("It has another length than it says.")
        return cls(tuple(fact[a:b] for a, b in pairwise(borders)), attrs.tolist(), frozenset(eog.tolist()))


_TOKENS = "tokens, 1"
_COMPARED = 64
"""Remembered tokens that are compared with the library's."""


def _read_tokens(handle: Handle, size: int) -> _Tokens:
    every = range(size)
    attrs = [int(llama().llama_vocab_get_attr(handle, token)) for token in every]
    eog = frozenset(token for token in every if llama().llama_vocab_is_eog(handle, token))
    return _Tokens(tuple(_read_pieces(handle, every)), attrs, eog)


def _recall_tokens(handle: Handle, size: int, facts: Facts | None) -> _Tokens | None:
    """None where they are not remembered, or some of them differ from the library's."""
    fact = facts.read(_TOKENS) if facts is not None else None
    if fact is None:
        return None
    try:
        tokens = _Tokens.from_bytes(fact)
    except ValueError:
        return None
    some = range(0, size, max(size // _COMPARED, 1))
    is_same = len(tokens.pieces) == size and all(
        tokens.pieces[token] == piece for token, piece in zip(some, _read_pieces(handle, some), strict=True)
    )
    return tokens if is_same else None


def _read_pieces(handle: Handle, tokens: Iterable[int]) -> Iterator[bytes]:
    buffer = ctypes.create_string_buffer(1 << 14)
    for token in tokens:
        length = llama().llama_token_to_piece(handle, token, buffer, len(buffer), 0, True)
        yield ctypes.string_at(buffer, max(length, 0))


def run_on_large_stack(call: Callable[[], T]) -> T:
    """What `call` returns or raises, from a thread whose stack a match of `MAX_MATCH` characters fits into.

    Blocks. Raises EngineError where no such thread can be started.
    """
    with ThreadPoolExecutor(1, "emberkeep-tokenizer") as thread:
        with _starting:  # the size is the process's: a thread that starts meanwhile elsewhere gets it too
            usual = threading.stack_size(_STACK_BYTES)
            try:
                result = thread.submit(call)
            except RuntimeError as error:
                raise EngineError(f"No thread could be started for tokenizing a text: {error}.") from error
            finally:
                threading.stack_size(usual)
        return result.result()
