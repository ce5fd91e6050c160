"""Gemma 4's own notation: `call:get_weather{city:<|"|>Paris<|"|>,days:3}`."""

from __future__ import annotations

import json
import re

from emberkeep.chat.dialects.calls import Calls, NoCall, as_json
from emberkeep.chat.dialects.tape import Reading, Tape

_QUOTE = '<|"|>'
_TOKEN = re.compile(
    r"""<\|"\|>(?P<text>.*?)<\|"\|> | (?P<string>"(?:[^"\\]|\\.)*") | (?P<key>[\w.\-]+)(?=\s*:)""",
    re.DOTALL | re.VERBOSE,
)


def gemma_call(tape: Tape, calls: Calls, end: str) -> Reading[None]:
    """One call, which is passed on as a whole: its values are no JSON while they are written."""
    yield from tape.takes("call:")
    name, stop = yield from tape.until("{", end)
    if stop != "{":
        raise NoCall
    calls.named(name.strip())
    body = yield from _body(tape, end)
    calls.whole(calls.tool.name, body)


def _body(tape: Tape, end: str) -> Reading[str]:
    """The end marker means nothing inside of a string."""
    body = "{"
    while True:
        text, stop = yield from tape.until(_QUOTE, end)
        if stop != _QUOTE:
            break
        string, closing = yield from tape.until(_QUOTE)
        body += text + _QUOTE + string + closing
    if tape.is_cut_here and not stop:
        raise NoCall
    written = _TOKEN.sub(_as_json, body + text)
    try:
        json.loads(written)
    except (ValueError, RecursionError):
        raise NoCall from None
    return written


def _as_json(token: re.Match[str]) -> str:
    if token["string"] is not None:
        return token["string"]
    key = token["key"]
    return as_json(token["text"] if key is None else key)
