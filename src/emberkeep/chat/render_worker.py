"""A program of its own: compiles and renders chat templates that came out of model files.

`template` starts it, sends one question at a time through its standard input, a socket, and reads one answer.
Only a process can be stopped: one step of a template can take minutes, hold the interpreter's lock all the while
or need all memory, and such steps cannot all be listed.
"""

from __future__ import annotations

import marshal
import math
import resource
import socket
import time
from collections import OrderedDict
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path

from emberkeep.chat.render_protocol import (
    ANSWER_HEADER,
    MAX_OUTPUT,
    QUESTION_HEADER,
    AnswerKind,
    Question,
    stop_error,
)
from emberkeep.chat.sandbox import JinjaTemplate
from emberkeep.chat.traits import find_traits
from emberkeep.errors import TemplateFailed

_TEMPLATES = 16
_OWN_CHARS = 1 << 20
_CHARS_PER_BYTE = 16
"""What a template may write: so much of its own, and so often what it was given."""
_MEMORY = 256 << 20
_MEMORY_PER_BYTE = 32
_MOST_MEMORY = 2 << 30
"""What it may need: beyond what the program itself does, and by the size of what it is given."""


def serve() -> None:
    """Says that it is ready with an empty text, then answers until its input ends."""
    _allow(resource.RLIMIT_CORE, 0)
    _allow(resource.RLIMIT_FSIZE, 0)
    templates, own = LoadedTemplates(), _address_space()
    with suppress(EOFError, OSError), socket.socket(fileno=0) as channel, channel.makefile("rwb") as stream:
        answer, data = AnswerKind.TEXT, b""
        while True:
            stream.write(ANSWER_HEADER.pack(answer, len(data)))
            stream.write(data)
            stream.flush()
            if answer is AnswerKind.SPENT:
                return
            del data  # not to be held while it waits
            seconds, size = QUESTION_HEADER.unpack(_read(stream, QUESTION_HEADER.size))
            _limit(seconds, own + min(_MEMORY + _MEMORY_PER_BYTE * size, _MOST_MEMORY))
            answer, data = _answer(templates, stream, seconds, size)


def _read(stream: BufferedIOBase, size: int) -> bytes:
    """Raises EOFError."""
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _answer(
    templates: LoadedTemplates, stream: BufferedIOBase, seconds: float, size: int
) -> tuple[AnswerKind, bytes]:
    try:
        question = marshal.loads(_read(stream, size))
        most = min(_OWN_CHARS + _CHARS_PER_BYTE * size, MAX_OUTPUT)
        answer, text = templates.answer(question, seconds, most)
        return answer, text.encode("utf-8", "surrogatepass")
    except TemplateFailed as failure:
        is_spent = isinstance(failure.__cause__, MemoryError)
        return AnswerKind.SPENT if is_spent else AnswerKind.FAILED, str(failure).encode("utf-8", "surrogatepass")
    except MemoryError:
        return AnswerKind.SPENT, str(stop_error("it needs too much memory")).encode()


class LoadedTemplates:
    """The one that was used longest ago makes room."""

    def __init__(self) -> None:
        self._templates: OrderedDict[bytes, JinjaTemplate] = OrderedDict()

    def answer(self, question: Question, seconds: float, most: int) -> tuple[AnswerKind, str]:
        """`most`: characters that a template may write. Raises TemplateFailed, MemoryError."""
        kind, key, about = question
        if kind == "load":
            self._load(key, about)
            return AnswerKind.TEXT, ""
        template = self._templates.get(key)
        if template is None:
            return AnswerKind.UNKNOWN, ""
        self._templates.move_to_end(key)
        if kind == "traits":
            return AnswerKind.TEXT, find_traits(template.render, about, seconds).to_json()
        return AnswerKind.TEXT, template.render(about, seconds, most)

    def _load(self, key: bytes, source: str) -> None:
        self._templates[key] = JinjaTemplate(source)
        if len(self._templates) > _TEMPLATES:
            self._templates.popitem(last=False)


def _limit(seconds: float, memory: int) -> None:
    """Also when no other process is left that would stop it. The system counts whole seconds."""
    _allow(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds) + 1)
    _allow(resource.RLIMIT_AS, memory)


def _address_space() -> int:
    """Of this process: on some systems most of it are tables of languages. 0 where it is not limited anyway."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _allow(what: int, amount: int) -> None:
    """As far as the system has such a limit (macOS does not count address space)."""
    _, hard = resource.getrlimit(what)
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))
