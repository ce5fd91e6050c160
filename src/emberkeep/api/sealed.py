"""Reasoning that clients carry for us as an opaque text. It hides nothing: most have the reasoning beside it."""

from __future__ import annotations

import base64
import zlib

_MOST_BYTES = 4 << 20
"""A small text can be made that unpacks to gigabytes."""


def seal(text: str, prefix: str) -> str:
    packed = zlib.compress(text.encode("utf-8", "surrogatepass"))
    return prefix + base64.urlsafe_b64encode(packed).decode()


def unseal(sealed: str, prefix: str) -> str:
    """The inverse; empty for what does not begin with `prefix`, or was not made here."""
    if not sealed.startswith(prefix):
        return ""
    try:
        packed = base64.b64decode(sealed.removeprefix(prefix).translate(_URL_SAFE), validate=True)
        return zlib.decompressobj().decompress(packed, _MOST_BYTES).decode("utf-8")
    except (ValueError, zlib.error):
        return ""


_URL_SAFE = str.maketrans("-_", "+/")
