"""Tokenizes long texts of many shapes; a program of its own, because what it looks for ends the process."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path

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
    from helpers.tiny_vocab import load

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
