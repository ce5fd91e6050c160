"""A vocabulary of the `tokenizers` library as an immutable value: pieces, specials, and tokenization.

Of GGUF files' vocabularies transformers leaves something out, and reads them slowly: see the end.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import modeling_gguf_pytorch_utils

from emberkeep.engine.text_splitter import RUNS, TextSplitter
from emberkeep.errors import ModelBroken
from emberkeep.types.request import Json

log = logging.getLogger("emberkeep.engine")

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


class WordVocab:
    """A tokenizer that may lose a part of the text, as those of encoders do. `tokenizer` belongs to it.

    `size` is the width of the model's table of tokens, of which the tokenizer may know fewer.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.size = size

    def tokenize(self, text: str, *, parse_special: bool = True) -> list[int]:
        tokenizer = self._tokenizer if parse_special else self._blind
        pieces = self._splitter.pieces(encodable(text))
        # `encode` would hold the interpreter lock: a long text would stop every other thread for seconds.
        encodings = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return [token for encoding in encodings for token in encoding.ids]

    @cached_property
    def pieces(self) -> Sequence[bytes]:
        return tuple(self._tokenizer.decode([token]).encode() for token in range(self.size))

    @cached_property
    def _splitter(self) -> TextSplitter:
        return _splitter_for(self._tokenizer)

    @cached_property
    def _blind(self) -> Tokenizer:
        """Sees control tokens as text. A copy: switching the one in use would reach other threads."""
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy


class HfVocab(WordVocab):
    """The vocabulary of a model that writes: nothing of a text is lost.

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
        super().__init__(tokenizer, size)
        if _is_byte_level(tokenizer) and set(_types(tokenizer.normalizer)) <= _UNICODE_FORMS | {"Sequence"}:
            # Text that comes back from a client must give the tokens that it was sampled as.
            tokenizer.normalizer = None
        self.bos = bos
        self.eos = eos
        added = {i: t for i, t in tokenizer.get_added_tokens_decoder().items() if i < size}
        self.pieces = _read_pieces(tokenizer, size, {i: t.content for i, t in added.items()})
        self.specials: Mapping[str, int] = {token.content: i for i, token in added.items() if token.content}
        self.controls = frozenset(i for i, token in added.items() if token.special)
        usual = (self.specials[name] for name in _ENDINGS & self.specials.keys())
        self.eog = frozenset(i for i in (*ends, *usual, eos) if i is not None and 0 <= i < size)
        starts = adds_bos if adds_bos is not None else tokenizer.encode("a").ids[:1] == [bos]
        self.adds_bos = starts and bos is not None

    @cached_property
    def splits_at_specials(self) -> bool:
        # Tried out, because much can couple the two sides: a special token that eats blanks, a blank that is
        # put before the first stretch of text only, a token that is looked for in the normalised text.
        return all(
            self.tokenize(left + text + right) == [*self.tokenize(left), special, *self.tokenize(right)]
            for text, special in self.specials.items()
            for left, right in (("a", "a"), ("a ", " a"))
        )


def _splitter_for(tokenizer: Tokenizer) -> TextSplitter:
    parts = [*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)]
    patterns = [str(part["pattern"].get("Regex", "")) for part in parts if part["type"] == "Split"]
    puts_blanks = any(part.get("add_prefix_space") or part["type"] in ("Prepend", "Metaspace") for part in parts)
    if puts_blanks or not any(patterns):
        return TextSplitter()
    # What is looked for at the end of a run (DeepSeek's `\s+$`, Cohere's `(?=(?:\d{3})*\b)`) is so from all of it,
    # and a match that is given up after ten million letters ends in a panic.
    looks_far = any("$" in pattern or "(?=" in pattern for pattern in patterns)
    specials = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.content}
    return TextSplitter(specials, strips=True, runs=RUNS if looks_far else (), limits_matches=True)


def encodable(text: str) -> str:
    """`text` with what no UTF-8 can hold (halves of surrogate pairs) replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_pieces(tokenizer: Tokenizer, size: int, added: Mapping[int, str]) -> tuple[bytes, ...]:
    to_bytes = _bytes_of_words(tokenizer)
    words = {i: word for word, i in tokenizer.get_vocab(with_added_tokens=False).items()}
    return tuple(
        added[i].encode() if i in added else to_bytes(words[i]) if i in words else b"" for i in range(size)
    )


def _bytes_of_words(tokenizer: Tokenizer) -> Callable[[str], bytes]:
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
        yield from _unfold(json.loads(component.__getstate__()))


def _unfold(part: dict[str, Json]) -> Iterator[dict[str, Json]]:
    yield part
    for name in ("normalizers", "pretokenizers", "decoders"):
        for inner in part.get(name, ()):
            yield from _unfold(inner)


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_letters()


def _from_byte_letters(word: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, word))
    except KeyError:
        return word.encode()


def _from_blank_letters(word: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(word)
    return bytes([int(byte[1], 16)]) if byte else word.replace("▁", " ").encode()


# ── what transformers leaves out of a GGUF file's tokenizer: how text is split first, where blanks are put ──

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_PATTERNS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}
"""The names are those of `tokenizer.ggml.pre`."""
_SAME_AS = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "pixtral": "llama-bpe",
    "dbrx": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
}
_PLAIN = frozenset({"gpt-2", "phi-2", "jais", "mpt", "olmo", "trillion"})
_DIGIT_BY_DIGIT = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})


def repair_gguf_tokenizer(tokenizer: Tokenizer, facts: Mapping[str, Json]) -> None:
    """Let `tokenizer`, which transformers made of a GGUF file, split text as llama.cpp does.

    `facts` are the file's `tokenizer.ggml.*` without that prefix.
    """
    if facts.get("model") == "llama":
        _put_blanks(tokenizer, bool(facts.get("add_space_prefix", True)))
    elif facts.get("model") == "gpt2":
        _split_first(tokenizer, str(facts.get("pre", "default")))


def gguf_adds_bos(facts: Mapping[str, Json]) -> bool:
    return bool(facts.get("add_bos_token", facts.get("model") == "llama"))


def gguf_ends(facts: Mapping[str, Json]) -> list[int]:
    """The ids that the file itself names as ends of a turn or a message."""
    named = (facts.get(f"{name}_token_id") for name in ("eos", "eot", "eom"))
    return [token for token in named if isinstance(token, int)]


def _put_blanks(tokenizer: Tokenizer, before_text: bool) -> None:
    blanks = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if before_text else blanks
    tokenizer.pre_tokenizer = None


def _split_first(tokenizer: Tokenizer, name: str) -> None:
    pattern = _PATTERNS.get(_SAME_AS.get(name, name))
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, _letters(use_regex=False)])
    elif name in _DIGIT_BY_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, _letters(use_regex=True)])
    elif name in _PLAIN:
        tokenizer.pre_tokenizer = _letters(use_regex=True)
    else:
        log.warning("this file splits text as %r says: some texts may get other tokens than with llama.cpp", name)


def _letters(*, use_regex: bool) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


_ARRAY, _STRING = 9, 8
_KEPT_ARRAY = 1024
_ARRAY_HEAD = struct.Struct("<IQ")
_LENGTH = struct.Struct("<Q")


@contextmanager
def read_quickly(rest: Sequence[Path]) -> Iterator[None]:
    """Until it ends, transformers loads GGUF files quickly and without a bar on stderr. One thread at a time.

    Else it makes objects of every word and number of the vocabulary, twice, which are not needed here, and maps
    the names of tensors anew for every module: half a minute for a usual vocabulary. `rest`: the other parts of a
    split model, of which transformers reads the first and knows nothing.
    """
    # Imported here because only GGUF files need it.
    import gguf

    class _GgufReader(gguf.GGUFReader):
        """Long arrays have their length and no content."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == _ARRAY and self.byte_order == "I":
                kind, count = _ARRAY_HEAD.unpack_from(self.data, orig_offs)
                scalar = self.gguf_scalar_to_np.get(gguf.GGUFValueType(kind))
                if count > _KEPT_ARRAY and (kind == _STRING or scalar is not None):
                    begin = orig_offs + _ARRAY_HEAD.size
                    size = _strings_size(self.data, begin, count) if kind == _STRING else scalar(0).nbytes * count
                    types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)]
                    return _ARRAY_HEAD.size + size, [np.zeros(1, np.uint8)], [0] * count, types
            return super()._get_field_parts(orig_offs, raw_type)

    def read(path: str) -> _GgufReader:
        reader = _GgufReader(path)
        for part in rest:
            reader.tensors.extend(_GgufReader(part).tensors)
        return reader

    with (
        patch.object(gguf, "GGUFReader", read),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda items, **_: items),
    ):
        yield


def _strings_size(data: Any, begin: int, count: int) -> int:
    view, at = memoryview(data), begin
    for _ in range(count):
        at += _LENGTH.size + _LENGTH.unpack_from(view, at)[0]
    return at - begin
