"""Vocabularies without a model around them, as llama.cpp loads them, one for each tokenizer that it has."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFWriter, TokenType

from emberkeep.engine.llamacpp.c_api import defaults
from emberkeep.engine.llamacpp.shared_library import llama, start_backend
from emberkeep.engine.llamacpp.vocab import LlamaVocab

SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
PRE_TOKENIZERS = (
    *(
        "default",
        "llama-bpe",
        "deepseek-llm",
        "deepseek-coder",
        "deepseek-v3",
        "spark2_5",
        "youtu",
        "falcon",
        "mpt",
    ),
    *("starcoder", "gpt-2", "jais-2", "gemma4", "sarvam-moe", "roberta-bpe", "refact", "command-r"),
    *(
        "qwen2",
        "qwen35",
        "stablelm2",
        "olmo",
        "dbrx",
        "smaug-bpe",
        "poro-chat",
        "glm4",
        "viking",
        "jais",
        "tekken",
    ),
    *("smollm", "codeshell", "bloom", "gpt3-finnish", "exaone", "exaone-moe", "chameleon", "minerva-7b", "gpt-4o"),
    *(
        "granite-embed-multi-97m",
        "tiny_aya",
        "superbpe",
        "trillion",
        "granite-docling",
        "bailingmoe",
        "seed-coder",
    ),
    *("hunyuan", "hunyuan-dense", "hy_v4", "joyai-llm", "kimi-k2", "ufakzeka", "grok-2", "afmoe", "laguna"),
    *("minicpm5", "minimax-m2", "solar-open", "mellum2"),
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
