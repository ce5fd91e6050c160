"""A program of its own: compiles and renders chat templates that came out of model files.

`render_pool` starts it, sends one question at a time through its standard input, a socket, and reads one answer.
Only a process can be stopped: one step of a template can take minutes, hold the interpreter's lock all the while
or need all memory, and there are more such steps than anybody can list.
"""

from __future__ import annotations

import marshal
import math
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Any

from emberkeep.chat.budget import MAX_OUTPUT
from emberkeep.chat.jinja import JinjaTemplate, stopped
from emberkeep.errors import TemplateFailed

ASKED = Struct("<dQ")
"""Seconds that the answer may take, and the size of what follows: plain values in marshal's format."""
ANSWERED = Struct("<BQ")
"""An `Answer`, and the size of the text that follows, as UTF-8."""

_TEMPLATES = 16
_OWN_CHARS = 1 << 20
_CHARS_PER_BYTE = 16
"""What a template may write: so much of its own, and so often what it was given."""
_SMALL = 1 << 16
_MEMORY = 256 << 20
_MEMORY_PER_BYTE = 32
_MOST_MEMORY = 2 << 30
"""What it may need: beyond what the program itself does, and by the size of what it is given."""


class Answer(IntEnum):
    TEXT = 1
    FAILED = 2
    """A sentence."""
    SPENT = 3
    """A sentence; and the worker ends, because it ran out of memory somewhere."""
    UNKNOWN = 4
    """The template has to be loaded first."""


Question = tuple[Any, ...]
"""("load", key, source) | ("traits", key, specials) | ("render", key, values)"""


def serve() -> None:
    """Says that it is ready with an empty text, then answers until nobody asks any more."""
    _allow(resource.RLIMIT_CORE, 0)
    _allow(resource.RLIMIT_FSIZE, 0)
    worker, own = Worker(), _address_space()
    with suppress(EOFError, OSError), socket.socket(fileno=0) as channel:
        answer, data = Answer.TEXT, b""
        while answer is not Answer.SPENT:
            send(channel, ANSWERED.pack(answer, len(data)), data)
            del data  # not to be held while nobody asks
            seconds, size = ASKED.unpack(_received(channel, ASKED.size))
            _limit(seconds, own + min(_MEMORY + _MEMORY_PER_BYTE * size, _MOST_MEMORY))
            answer, data = _answered(worker, channel, seconds, size)
        send(channel, ANSWERED.pack(answer, len(data)), data)


def _answered(worker: Worker, channel: socket.socket, seconds: float, size: int) -> tuple[Answer, bytes]:
    try:
        question = marshal.loads(_received(channel, size))
        most = min(_OWN_CHARS + _CHARS_PER_BYTE * size, MAX_OUTPUT)
        answer, text = worker.answer(question, seconds, most)
        return answer, text.encode("utf-8", "surrogatepass")
    except TemplateFailed as failure:
        is_spent = isinstance(failure.__cause__, MemoryError)
        return Answer.SPENT if is_spent else Answer.FAILED, str(failure).encode("utf-8", "surrogatepass")
    except MemoryError:
        return Answer.SPENT, str(stopped("it needs too much memory")).encode()


class Worker:
    """The templates that are loaded; the one that was used longest ago makes room."""

    def __init__(self) -> None:
        self._templates: OrderedDict[bytes, JinjaTemplate] = OrderedDict()

    def answer(self, question: Question, seconds: float, most: int) -> tuple[Answer, str]:
        """`most`: characters that a template may write. Raises TemplateFailed, MemoryError."""
        kind, key, about = question
        if kind == "load":
            self._load(key, about)
            return Answer.TEXT, ""
        template = self._templates.get(key)
        if template is None:
            return Answer.UNKNOWN, ""
        self._templates.move_to_end(key)
        if kind == "traits":
            return Answer.TEXT, template.traits(about, seconds).to_json()
        return Answer.TEXT, template.render(about, seconds, most)

    def _load(self, key: bytes, source: str) -> None:
        self._templates[key] = JinjaTemplate(source)
        if len(self._templates) > _TEMPLATES:
            self._templates.popitem(last=False)


def _limit(seconds: float, memory: int) -> None:
    """Also when nobody is left who would stop it. The system counts whole seconds."""
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


def _received(channel: socket.socket, size: int) -> bytearray:
    """Raises EOFError."""
    data = bytearray(size)
    fill(memoryview(data), channel.recv_into)
    return data


def send(channel: socket.socket, header: bytes, data: bytes) -> None:
    """Together where copying costs little: each part would wake the other side. Raises OSError."""
    if len(data) < _SMALL:
        channel.sendall(header + data)
        return
    channel.sendall(header)
    channel.sendall(data)


def fill(view: memoryview, receive: Callable[[memoryview], int]) -> None:
    """Raises EOFError."""
    while view:
        count = receive(view)
        if not count:
            raise EOFError
        view = view[count:]
