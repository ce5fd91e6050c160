"""A program of its own: compiles and renders chat templates that came out of model files, and so are foreign code.

`chat/template.py` starts it, sends one question at a time through its standard input, a socket, and reads one
answer. Jinja's immutable sandbox keeps templates away from Python. It does not bound what they cost, and only a
process can be stopped: one step of a template can take minutes, hold the interpreter's lock all the while or need
all memory, and such steps cannot all be listed.
"""

from __future__ import annotations

import json
import marshal
import math
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from enum import IntEnum
from functools import cache, lru_cache
from io import BufferedIOBase
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, Literal

from emberkeep.errors import TemplateFailed
from emberkeep.types.request import Json

if TYPE_CHECKING:  # Jinja is for this program alone, and who starts it imports this module too
    from jinja2 import Environment, nodes
    from jinja2.parser import Parser

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
MAX_SOURCE = 1 << 20
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
    _environment()  # before the first question, which has a time limit
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
    template = _compiled(source)
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


# ── templates made to run ──


class JinjaTemplate:
    """Runs its source in this process, where nothing can stop it: foreign ones belong in a worker.

    Raises TemplateFailed when `source` is not a template, and MemoryError.
    """

    def __init__(self, source: str) -> None:
        try:
            if len(source) > MAX_SOURCE:
                raise ValueError(f"it is longer than {MAX_SOURCE} characters")
            self._template = _environment().from_string(source)
        except MemoryError:
            raise
        # Foreign code: Jinja, Python's parser and its recursion limit all have their say.
        except Exception as error:
            raise TemplateFailed(f"The model's chat template is not valid Jinja: {_reason(error)}.") from error

    def render(self, values: Mapping[str, Json]) -> str:
        """Raises TemplateFailed, MemoryError."""
        try:
            return self._template.render(values)
        except MemoryError:
            raise
        # Foreign code may fail in any way; all of them mean that it cannot write these messages.
        except Exception as error:
            raise TemplateFailed(
                f"The model's chat template refused these messages ({_reason(error)}): "
                "change them to what it expects.",
                "messages",
            ) from error


def _reason(error: Exception) -> str:
    """The first line of a foreign error, short enough for one sentence."""
    text = str(getattr(error, "message", None) or error) or type(error).__name__
    line = text.strip().partition("\n")[0]
    return line[:200].rstrip(".")


@lru_cache(_TEMPLATES)
def _compiled(source: str) -> JinjaTemplate:
    return JinjaTemplate(source)


# ── the dialect of chat templates ──


@cache
def _environment() -> Environment:
    """Loads Jinja: nothing else in its process may need it."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationTag(Extension):
        """`{% generation %}` marks the assistant's text for training; here it is only its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class ChatEnvironment(ImmutableSandboxedEnvironment):
        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if type(obj) is Namespace:
                # Holds only what the template put there. Templates that scan all messages for each message
                # come here a million times, and Jinja's own check is slow.
                return not attr.startswith("_")
            return super().is_safe_attribute(obj, attr, value)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ChatEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": _strftime_now}
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, with no escaping for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:200])
