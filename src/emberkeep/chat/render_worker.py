"""A program of its own: compiles and renders chat templates that came out of model files.

`render_pool` starts it, sends one question at a time through its standard input, a socket, and reads one answer.
Only a process can be stopped: one step of a template can take minutes, hold the interpreter's lock all the while
or need all memory, and such steps cannot all be listed.
"""

from __future__ import annotations

import marshal
import math
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from functools import lru_cache
from io import BufferedIOBase
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, Literal

from emberkeep.errors import TemplateFailed

if TYPE_CHECKING:  # Jinja is for this program alone, and who starts it imports this module too
    from emberkeep.chat.sandbox import JinjaTemplate

QUESTION_HEADER = Struct("<dQ")
"""Seconds that the answer may take, and the size of what follows: a `Question` in marshal's format."""
ANSWER_HEADER = Struct("<BQ")
"""An `AnswerKind`, and the size of the text that follows, as UTF-8."""
Wanted = Literal["render", "traits"]
Question = tuple[Wanted, str, dict[str, Any]]
"""What is wanted, the template's source, and its variables."""

MAX_OUTPUT = 32 << 20
"""Characters of a prompt."""
_OWN_CHARS = 1 << 20
_CHARS_PER_BYTE = 16
"""What a template may write: so much of its own, and so often what it was given."""
_MEMORY = 256 << 20
_MEMORY_PER_BYTE = 32
_MOST_MEMORY = 2 << 30
"""What it may need: beyond what the program itself does, and by the size of what it is given."""
_TEMPLATES = 16
_TRIAL_SHARE = 0.75
"""The part of its time that a trial may take: what was found out until then is an answer, too."""


class AnswerKind(IntEnum):
    TEXT = 1
    FAILED = 2
    """A sentence."""
    SPENT = 3
    """A sentence; and the worker ends, because it ran out of memory somewhere."""


def serve() -> None:
    """Says that it is ready with an empty text, then answers until its input ends."""
    _allow(resource.RLIMIT_CORE, 0)
    _allow(resource.RLIMIT_FSIZE, 0)
    signal.signal(signal.SIGALRM, _interrupt)
    from emberkeep.chat import sandbox  # noqa: F401  before the first question, which has a time limit

    own = _address_space()
    with suppress(EOFError, OSError), socket.socket(fileno=0) as channel, channel.makefile("rwb") as stream:
        kind, text = AnswerKind.TEXT, ""
        while True:
            data = text.encode("utf-8", "replace")  # half of a surrogate pair is no text
            stream.write(ANSWER_HEADER.pack(kind, len(data)))
            stream.write(data)
            stream.flush()
            if kind is AnswerKind.SPENT:
                return
            del data, text  # not to be held while it waits
            seconds, size = QUESTION_HEADER.unpack(_read(stream, QUESTION_HEADER.size))
            _limit(seconds, own + min(_MEMORY + _MEMORY_PER_BYTE * size, _MOST_MEMORY))
            kind, text = _answer(stream, size, seconds)


def _read(stream: BufferedIOBase, size: int) -> bytes:
    """Raises EOFError."""
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _answer(stream: BufferedIOBase, size: int, seconds: float) -> tuple[AnswerKind, str]:
    try:
        text = _text(marshal.loads(_read(stream, size)), seconds)
        if len(text) > min(_OWN_CHARS + _CHARS_PER_BYTE * size, MAX_OUTPUT):
            raise stop_error("it builds more text than is allowed")
        return AnswerKind.TEXT, text
    except TemplateFailed as failure:
        return AnswerKind.FAILED, str(failure)
    except MemoryError:
        return AnswerKind.SPENT, str(stop_error("it needs too much memory"))


def _text(question: Question, seconds: float) -> str:
    """Raises TemplateFailed, MemoryError."""
    from emberkeep.chat.traits import find_traits

    wanted, source, values = question
    template = _template(source)
    if wanted == "render":
        return template.render(values)
    return find_traits(_until(template.render, time.monotonic() + _TRIAL_SHARE * seconds), values).to_json()


def _until(render: Callable[[Mapping[str, Any]], str], deadline: float) -> Callable[[Mapping[str, Any]], str]:
    """`render`, which fails when it has not ended by then. A template that never ends is found to write nothing,
    and its model still answers what needs no template."""

    def write(values: Mapping[str, Any]) -> str:
        left = deadline - time.monotonic()
        if left <= 0:
            raise stop_error("it takes too long")
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            return render(values)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    return write


def _interrupt(number: int, frame: object) -> None:
    """Raises TemplateFailed in the middle of what a template does."""
    raise stop_error("it takes too long")


@lru_cache(_TEMPLATES)
def _template(source: str) -> JinjaTemplate:
    from emberkeep.chat.sandbox import JinjaTemplate

    return JinjaTemplate(source)


def stop_error(reason: str) -> TemplateFailed:
    return TemplateFailed(f"The model's chat template was stopped: {reason}.", "messages")


def _limit(seconds: float, memory: int) -> None:
    """Also when no other process is left that would stop it. The system counts whole seconds."""
    _allow(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds) + 1)
    _allow(resource.RLIMIT_AS, memory)


def _address_space() -> int:
    """What this process takes now: on some systems mostly tables of languages. 0: it is not limited anyway."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _allow(what: int, amount: int) -> None:
    """As far as the system has such a limit (macOS does not count address space)."""
    _, hard = resource.getrlimit(what)
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))
