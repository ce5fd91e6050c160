"""A vocabulary of the `tokenizers` library as an immutable value: pieces, specials, and tokenisation."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from emberkeep.engine.text_splitter import RUNS, TextSplitter
from emberkeep.errors import ModelBroken
from emberkeep.types import Json

_ENDINGS = frozenset(
    {
        "</s>",
        "<EOT>",
        "<end_of_turn>",
        "<turn|>",
        "<|call|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|endofturn|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|return|>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Models end a turn with these even where their files name another token as the end."""

# Its threads, one for each core, are for batches of texts; here a text is tokenized on the thread that asks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class HfVocab:
    """`tokenizer` belongs to it from now on. `size` is the width of the model's logits, of which the tokenizer may
    know fewer.

    `eos` and `ends` are what the model's files say about endings; `adds_bos` None means as the tokenizer does.
    Raises ModelBroken for a tokenizer that loses a part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        size: int,
        *,
        bos: int | None = None,
        eos: int | None = None,
        ends: Iterable[int] = (),
        adds_bos: bool | None = None,
    ) -> None:
        _make_exact(tokenizer)
        self._tokenizer = tokenizer
        self.size = size
        self.bos = bos
        self.eos = eos
        added = {i: t for i, t in self._tokenizer.get_added_tokens_decoder().items() if i < size}
        self.pieces: Sequence[bytes] = _read_pieces(
            self._tokenizer, size, {i: t.content for i, t in added.items()}
        )
        self.specials: Mapping[str, int] = {token.content: i for i, token in added.items() if token.content}
        self.controls = frozenset(i for i, token in added.items() if token.special)
        usual = (self.specials[name] for name in _ENDINGS & self.specials.keys())
        self.eog = frozenset(i for i in (*ends, *usual, eos) if i is not None and 0 <= i < size)
        self.adds_bos = _adds(self._tokenizer, bos) if adds_bos is None else adds_bos and bos is not None

    @cached_property
    def splits_at_specials(self) -> bool:
        # Tried out, because much can couple the two sides: a special token that eats blanks, a blank that is
        # put before the first stretch of text only, a token that is looked for in the normalised text.
        return all(
            self.tokenize(left + text + right) == [*self.tokenize(left), special, *self.tokenize(right)]
            for text, special in self.specials.items()
            for left, right in (("a", "a"), ("a ", " a"))
        )

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        tokenizer = self._tokenizer if parse_special else self._blind
        pieces = self._splitter.pieces(_encodable(text))
        # `encode` would hold the interpreter lock: a long text would stop every other thread for seconds.
        encodings = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return [token for encoding in encodings for token in encoding.ids]

    @cached_property
    def _splitter(self) -> TextSplitter:
        return _splitter_for(self._tokenizer, self.specials.keys())

    @cached_property
    def _blind(self) -> Tokenizer:
        """Sees control tokens as text. A copy: switching the one in use would reach other threads."""
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy


def _make_exact(tokenizer: Tokenizer) -> None:
    """Let it neither cut, pad nor rewrite text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if _is_byte_level(tokenizer) and set(_types(tokenizer.normalizer)) <= _UNICODE_FORMS | {"Sequence"}:
        # Text that comes back from a client must give the tokens that it was sampled as.
        tokenizer.normalizer = None


def _splitter_for(tokenizer: Tokenizer, specials: Collection[str]) -> TextSplitter:
    parts = [*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)]
    patterns = [str(part["pattern"].get("Regex", "")) for part in parts if part["type"] == "Split"]
    puts_blanks = any(part.get("add_prefix_space") or part["type"] in ("Prepend", "Metaspace") for part in parts)
    if puts_blanks or not any(patterns):
        return TextSplitter()
    # What is looked for at the end of a run (DeepSeek's `\s+$`, Cohere's `(?=(?:\d{3})*\b)`) is so from all of it,
    # and a match that is given up after ten million letters ends in a panic.
    looks_far = any("$" in pattern or "(?=" in pattern for pattern in patterns)
    return TextSplitter(specials, strips=True, runs=RUNS if looks_far else (), limits_matches=True)


def _encodable(text: str) -> str:
    """`text` with what no UTF-8 can hold (halves of surrogate pairs) replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _adds(tokenizer: Tokenizer, bos: int | None) -> bool:
    return bos is not None and tokenizer.encode("a").ids[:1] == [bos]


def _read_pieces(tokenizer: Tokenizer, size: int, added: Mapping[int, str]) -> tuple[bytes, ...]:
    spelled = _spelling(tokenizer)
    words = {i: word for word, i in tokenizer.get_vocab(with_added_tokens=False).items()}
    return tuple(
        added[i].encode() if i in added else spelled(words[i]) if i in words else b"" for i in range(size)
    )


def _spelling(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """How the words of a vocabulary stand for bytes."""
    if _is_byte_level(tokenizer):
        return _from_byte_letters
    if _has_blank_letter(tokenizer):
        return _from_blank_letters
    raise ModelBroken(
        f"The model's tokenizer ({type(tokenizer.model).__name__}) does not keep every byte of a text: choose a "
        "model whose tokenizer is byte-level BPE or SentencePiece."
    )


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return "ByteLevel" in {*_types(tokenizer.pre_tokenizer), *_types(tokenizer.decoder)}


def _has_blank_letter(tokenizer: Tokenizer) -> bool:
    writes_it = any(part.get("content") == "▁" for part in _parts(tokenizer.normalizer))
    return writes_it or "Metaspace" in {*_types(tokenizer.pre_tokenizer), *_types(tokenizer.decoder)}


def _types(component: Any) -> Iterator[str]:
    return (str(part["type"]) for part in _parts(component))


def _parts(component: Any) -> Iterator[dict[str, Json]]:
    """A component of a tokenizer, as JSON, and everything that it consists of."""
    if component is not None:
        yield from _unfolded(json.loads(component.__getstate__()))


def _unfolded(part: dict[str, Json]) -> Iterator[dict[str, Json]]:
    yield part
    for name in ("normalizers", "pretokenizers", "decoders"):
        for inner in part.get(name, ()):
            yield from _unfolded(inner)


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_letters()


def _from_byte_letters(word: str) -> bytes:
    try:
        return bytes(_BYTES[letter] for letter in word)
    except KeyError:
        return word.encode()


def _from_blank_letters(word: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(word)
    return bytes([int(byte[1], 16)]) if byte else word.replace("▁", " ").encode()
