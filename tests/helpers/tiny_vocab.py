"""Vocabularies without a model around them, one for each tokenizer of llama.cpp, and long texts for them.

Run as a program it tokenizes the texts: what it looks for would end the process.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from gguf import GGUFWriter, TokenType

from emberkeep.engine.llamacpp.c_api import defaults
from emberkeep.engine.llamacpp.shared_library import llama, start_backend
from emberkeep.engine.llamacpp.vocab import LlamaVocab

SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
PRE_TOKENIZERS = (
    *("default", "llama-bpe", "deepseek-llm", "deepseek-coder", "deepseek-v3", "spark2_5", "youtu", "falcon"),
    *("mpt", "starcoder", "gpt-2", "jais-2", "gemma4", "sarvam-moe", "roberta-bpe", "refact", "command-r"),
    *("qwen2", "qwen35", "stablelm2", "olmo", "dbrx", "smaug-bpe", "poro-chat", "glm4", "viking", "jais"),
    *("tekken", "smollm", "codeshell", "bloom", "gpt3-finnish", "exaone", "exaone-moe", "chameleon"),
    *("minerva-7b", "gpt-4o", "granite-embed-multi-97m", "tiny_aya", "superbpe", "trillion", "granite-docling"),
    *("bailingmoe", "seed-coder", "hunyuan", "hunyuan-dense", "hy_v4", "joyai-llm", "kimi-k2", "ufakzeka"),
    *("grok-2", "afmoe", "laguna", "minicpm5", "minimax-m2", "solar-open", "mellum2"),
)
"""What `tokenizer.ggml.pre` may be for byte-pair vocabularies, one name for each of llama.cpp's own numbers."""
OTHER_TOKENIZERS = ("llama", "bert", "rwkv", "plamo2")
"""What `tokenizer.ggml.model` may be besides `gpt2`."""
REFUSED = ("t5", "whitespace:whitespace", "gpt2:whitespace")
"""Vocabularies with which llama.cpp would end the process at some text."""
_TEXT_PIECES = ("gemma4", "sarvam-moe")
"""Pre-tokenizers of vocabularies whose pieces are text, not letters for bytes."""
_MERGES = ("t h", "h e", "th e", "i n", "e r", "a n", "a b", "ab c", "a a", "aa aa", "7 7", "好 好")
_BYTE_MERGES = ("Ġ the", "Ġ a", "Ġ Ġ", "ĠĠ ĠĠ", "Ċ Ċ", "å ¥", "å¥ ½")


def load(folder: Path, model: str = "gpt2", pre: str = "default") -> LlamaVocab | None:
    """The vocabulary, for as long as the process lives; None where this llama.cpp does not know its kind."""
    return read(write(folder, model, pre), pre)


def read(path: Path, pre: str = "default") -> LlamaVocab | None:
    start_backend()
    params = defaults(llama().llama_model_default_params)
    params.vocab_only = True
    handle = llama().llama_model_load_from_file(str(path).encode(), params)
    return LlamaVocab(llama().llama_model_get_vocab(handle), pre) if handle else None


def write(folder: Path, model: str, pre: str) -> Path:
    """`model` and `pre` as in `tokenizer.ggml.model` and `tokenizer.ggml.pre`."""
    path = folder / f"{model}-{pre}.gguf"
    is_byte_level = model == "gpt2" and pre not in _TEXT_PIECES
    merges = (*_MERGES[:-1], *_BYTE_MERGES) if is_byte_level else _MERGES
    pieces, kinds = _byte_level(merges) if is_byte_level else _text_pieces(model, merges)
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(len(piece)) for piece in pieces])
    writer.add_token_types(kinds)
    writer.add_token_merges(list(merges))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _byte_level(merges: tuple[str, ...]) -> tuple[list[str], list[TokenType]]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [*map(chr, printable), *(chr(0x100 + n) for n in range(256 - len(printable)))]
    pieces = [*SPECIALS, *letters, *_merged(merges)]
    return pieces, [TokenType.CONTROL] * len(SPECIALS) + [TokenType.NORMAL] * (len(pieces) - len(SPECIALS))


def _text_pieces(model: str, merges: tuple[str, ...]) -> tuple[list[str], list[TokenType]]:
    is_rwkv = model == "rwkv"
    of_byte = TokenType.NORMAL if model in ("rwkv", "bert") else TokenType.BYTE
    of_bytes = [f"\\x{byte:02x}" if is_rwkv else f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*SPECIALS, *of_bytes, *(() if is_rwkv else "abcdehinrt▁7好"), *_merged(merges)]
    kinds = [TokenType.CONTROL] * len(SPECIALS) + [of_byte] * 256
    return pieces, kinds + [TokenType.NORMAL] * (len(pieces) - len(kinds))


def _merged(merges: tuple[str, ...]) -> list[str]:
    return [merge.replace(" ", "") for merge in merges]


UNITS: Mapping[str, str] = {
    "letters": "a",
    "capitals": "A",
    "cases": "aBc",
    "cjk": "好",
    "kana": "か・",
    "accents": "é",
    "marks": "\u0301",
    "letters and marks": "a\u0301",
    "thai": "ก็ที่",
    "blanks": " ",
    "wide blanks": "\u3000",
    "tabs": "\t ",
    "newlines": "\n",
    "line ends": "\r\n",
    "slashes and newlines": "/\n",
    "digits": "7",
    "other digits": "٣",
    "punctuation": "!",
    "symbols": "→≠",
    "brackets": "<",
    "words": "a ",
    "words with marks": "a\u0301 ",
    "emoji": "👩‍👧🏽",
    "nothing": "\0",
    "half pairs": "\ud83d",
    "json": '{"key":[1,"好"],',
    "specials": "<|im_end|>",
    "quoted specials": "<|im_end|",
}
COMMON = ("letters", "cjk", "blanks", "digits", "base64")


def text_of(shape: str, chars: int) -> str:
    """`chars` characters of it, and then something else, for what looks ahead."""
    if shape == "base64":
        return _random("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", chars) + "=\n"
    if shape == "mixed":
        return _random("".join(UNITS.values()), chars)
    unit = UNITS[shape]
    return unit * (chars // len(unit)) + "好7 x"


def _random(alphabet: str, chars: int) -> str:
    return "".join(random.Random(0).choices(alphabet, k=chars))


SHAPES = (*UNITS, "base64", "mixed")


def main(folder: str, chars: str, shapes: str, *vocabularies: str) -> None:

    for name in vocabularies:
        model, _, pre = name.partition(":")
        vocab = load(Path(folder), model, pre or "default")
        for shape in (shapes.split(",") if shapes else SHAPES) if vocab else ():
            print(name, shape, end=" ", flush=True)
            text = text_of(shape, int(chars))
            began = time.perf_counter()
            ids = vocab.tokenize(text)
            print(f"{time.perf_counter() - began:.3f}", flush=True)
            if model == "gpt2":
                assert b"".join(map(vocab.pieces.__getitem__, ids)) == text.encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    main(*sys.argv[1:])
