"""Bytes from elsewhere as text, where they are text."""

from __future__ import annotations

import codecs
import re

_SAMPLE = 8192
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_WIDE = re.compile(r"utf-?(16|32)([bl]e)?", re.IGNORECASE)
# Python has codecs that take quadratic time, or are no charsets at all.
_CHARSET = re.compile(
    rf"{_WIDE.pattern}|utf-?8|(us-)?ascii|latin-?1|iso-8859-\d+|(windows-|cp)125\d|koi8-[ru]"
    r"|gb(k|2312|18030)|big5|shift[_-]jis|euc-(jp|kr)",
    re.IGNORECASE,
)


def decoded(data: bytes, charset: str | None = None) -> str | None:
    """Its text, with marks for what cannot be read; None where it is binary."""
    if data.startswith(_UTF16):
        charset = "utf-16"
    elif charset is None or not _CHARSET.fullmatch(charset):
        charset = "utf-8-sig"
    if b"\0" in data[:_SAMPLE] and not _WIDE.fullmatch(charset):
        return None
    text = data.decode(charset, "replace")
    return None if 10 * text.count("\ufffd") > len(text) else text
