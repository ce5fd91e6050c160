"""What transformers leaves out of a GGUF file's tokenizer: how text is split first, and where blanks are put."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from emberkeep.types import Json

log = logging.getLogger("emberkeep.engine")

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


def repair(tokenizer: Tokenizer, facts: Mapping[str, Json]) -> None:
    """Let `tokenizer`, which transformers made of a GGUF file, split text as llama.cpp does.

    `facts` are the file's `tokenizer.ggml.*` without that prefix.
    """
    if facts.get("model") == "llama":
        _put_blanks(tokenizer, bool(facts.get("add_space_prefix", True)))
    elif facts.get("model") == "gpt2":
        _split_first(tokenizer, str(facts.get("pre", "default")))


def adds_bos(facts: Mapping[str, Json]) -> bool:
    return bool(facts.get("add_bos_token", facts.get("model") == "llama"))


def ends(facts: Mapping[str, Json]) -> list[int]:
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
