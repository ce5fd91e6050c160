"""A model's chat template: messages in, prompt text out, and what can be found out about it by trying.

A template out of a model file is foreign code, so it runs in a process that is stopped when it takes too long
(`render_worker`). One is started when it is first needed, and stays: it costs a tenth of a second and 25 MB once,
and each prompt a little more than it would here. It gets no file, no socket but its own and no secret of the
environment, and ends when this process does, because that closes the other end of its socket.
"""

from __future__ import annotations

import atexit
import codecs
import hashlib
import json
import marshal
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from emberkeep.chat.messages import later_systems_in_users, system_in_first_user, tools_as_text, values_for
from emberkeep.chat.render_protocol import (
    ANSWER_HEADER,
    MAX_OUTPUT,
    MAX_SECONDS,
    MORE_SECONDS_PER_MESSAGE,
    QUESTION_HEADER,
    AnswerKind,
    Question,
    stop_error,
)
from emberkeep.chat.traits import CallWriting, Traits, find_traits
from emberkeep.errors import Overloaded, TemplateFailed
from emberkeep.signals import with_default_signals
from emberkeep.types.request import Json, Message, Tool
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.chat.sandbox import JinjaTemplate

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

NO_ARGS: Final[Mapping[str, Json]] = MappingProxyType({})

MOST_WORKERS = 4
_KEPT = 2
_PATIENCE_S = 0.05
"""A worker is soon free again, sooner than another one has started."""
_START_S = 30.0
_GRACE_S = 0.5
"""For a template that stops by itself when its time is over, and has to say so."""
_CHUNK = 1 << 20
_PIECE = 1 << 16
"""Bytes that are decoded at once: a lone surrogate takes a microsecond, with the interpreter's lock."""
_SMALL = 1 << 16
_LONGEST_SENTENCE = 1000
_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Dates are to be the same, and some Pythons do not start without their libraries. The rest may hold secrets."""
_PROGRAM = "import sys; sys.path += sys.argv[1:]; from emberkeep.chat.render_worker import serve; serve()"


class ChatTemplate:
    """Immutable after construction; `render` may be called from any thread and blocks for at most seconds.

    A template out of a model file runs in a process of its own. Raises TemplateFailed when `source` is not a
    template or cannot be tried in time, and Overloaded when there can be no such process now.
    """

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        self.source = source
        self._specials = {"bos_token": bos, "eos_token": eos}
        self._template: JinjaTemplate | IsolatedTemplate
        if source == CHATML:  # ours is known to end, and needs no process
            # Imported here: it brings Jinja, which else only the processes need.
            from emberkeep.chat.sandbox import JinjaTemplate

            self._template = JinjaTemplate(source)
            self._traits = find_traits(self._template.render, self._specials, MAX_SECONDS)
        else:
            self._template = IsolatedTemplate(source)
            self._traits = self._template.find_traits(self._specials, MAX_SECONDS)

    @classmethod
    def default(cls, *, bos: str = "", eos: str = "") -> ChatTemplate:
        """For models that bring no template: ChatML, which most models have seen."""
        return cls(CHATML, bos=bos, eos=eos)

    @property
    def supports_tools(self) -> bool:
        """The template writes tool definitions, calls and results; otherwise they are written as text for it."""
        return self._traits.supports_tools

    @property
    def writing(self) -> CallWriting:
        """How a call is written that the model is made to write."""
        return self._traits.writing

    @property
    def turn_end(self) -> str:
        """What always follows an assistant's content, up to the next message's header. Empty when unknown."""
        return self._traits.turn_end

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        args: Mapping[str, Json] = NO_ARGS,
    ) -> str:
        """The prompt; the same for the same input, unless the template asks for the date.

        Raises TemplateFailed, Overloaded.
        """
        traits = self._traits
        if not traits.supports_tools:
            messages, tools = tools_as_text(messages, tools), ()
        if not traits.supports_later_system:
            messages = later_systems_in_users(messages)
        if not traits.supports_system:
            messages = system_in_first_user(messages)
        values = {
            **args,
            "add_generation_prompt": add_generation_prompt,
            **self._specials,
            **values_for(messages, tools, traits.form, has_empty_list=traits.loops_over_no_tools),
        }
        return self._template.render(values, MAX_SECONDS + MORE_SECONDS_PER_MESSAGE * len(messages))


# ── in a process of its own ──


class IsolatedTemplate:
    """A template that runs in a worker. Safe to use from several threads.

    Raises TemplateFailed; Overloaded when no worker can be started.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()

    def render(self, values: Mapping[str, Json], seconds: float) -> str:
        return self._ask(("render", self._key, dict(values)), seconds)

    def find_traits(self, specials: Mapping[str, str], seconds: float) -> Traits:
        text = self._ask(("traits", self._key, dict(specials)), seconds)
        try:
            return Traits.from_json(text)
        except ValueError as error:
            raise _broken() from error

    def _ask(self, question: Question, seconds: float) -> str:
        data = _marshal(question)
        with _POOL.worker() as worker:
            answer = worker.ask(data, seconds)
            if answer.kind is AnswerKind.UNKNOWN:
                answer = worker.ask(_marshal(("load", self._key, self._source)), MAX_SECONDS)
                if answer.kind is AnswerKind.TEXT:
                    answer = worker.ask(data, seconds)
        if answer.kind is AnswerKind.TEXT:
            return answer.text
        raise TemplateFailed(answer.text[:_LONGEST_SENTENCE], "messages")


def _marshal(question: Question) -> bytes:
    """Raises TemplateFailed where it holds something that is no JSON."""
    try:
        return marshal.dumps(question)
    except ValueError:
        pass  # subclasses, which are written as what they stand for
    try:
        kind, key, *about = question
        return marshal.dumps((kind, key, *json.loads(json.dumps(about))))
    except (TypeError, ValueError, RecursionError) as error:
        raise stop_error(f"it cannot be given these values ({error})") from error


def _broken() -> TemplateFailed:
    return stop_error("it ended the process that it ran in")


@dataclass(frozen=True, slots=True)
class _Reply:
    kind: AnswerKind
    text: str


class _Worker:
    """A process, and this end of its socket. For one thread at a time.

    After anything but an answer it has to be ended: what it says next would be taken for the answer to
    another question.
    """

    def __init__(self) -> None:
        """Raises Overloaded."""
        try:
            self._channel, self._process = _start_process()
        except OSError as error:
            raise _unavailable(error.strerror or str(error)) from error
        self.is_spent = False
        try:
            self._answer(time.monotonic() + _START_S)
        except (TemplateFailed, OSError) as error:
            self.end()
            raise _unavailable("it does not start") from error
        except BaseException:
            self.end()
            raise

    @property
    def is_waiting(self) -> bool:
        """It is alive and has said nothing without being asked."""
        self._channel.setblocking(False)
        try:
            self._channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def ask(self, data: bytes, seconds: float) -> _Reply:
        """Blocks for `seconds`, and a moment. Raises TemplateFailed."""
        deadline = time.monotonic() + seconds + _GRACE_S
        try:
            self._wait_until(deadline)
            self._send(QUESTION_HEADER.pack(seconds, len(data)), data)
            answer = self._answer(deadline)
        except TimeoutError:
            raise stop_error("it takes too long") from None
        except OSError as error:
            raise self._ending() from error
        self.is_spent = answer.kind is AnswerKind.SPENT
        return answer

    def end(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def abandon(self) -> None:
        """To the process that this one was forked from."""
        self._channel.close()
        self._process.returncode = 0  # not ours to wait for

    def _send(self, header: bytes, data: bytes) -> None:
        """In one part where copying costs little: each part would wake the other side. Raises OSError."""
        if len(data) < _SMALL:
            self._channel.sendall(header + data)
            return
        self._channel.sendall(header)
        self._channel.sendall(data)

    def _answer(self, deadline: float) -> _Reply:
        """Raises TemplateFailed, OSError."""
        header = bytearray(ANSWER_HEADER.size)
        try:
            self._fill(memoryview(header), deadline)
            kind, size = ANSWER_HEADER.unpack(header)
            if size > 4 * MAX_OUTPUT:
                raise _broken()
            return _Reply(AnswerKind(kind), self._text(size, deadline))
        except EOFError:
            raise self._ending() from None
        except ValueError as error:  # no answer, or no UTF-8
            raise _broken() from error

    def _text(self, size: int, deadline: float) -> str:
        decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        parts: list[str] = []
        chunk = memoryview(bytearray(min(size, _CHUNK)))
        while size:
            view = chunk[:size]
            self._fill(view, deadline)
            parts += (decoder.decode(view[i : i + _PIECE]) for i in range(0, len(view), _PIECE))
            size -= len(view)
        return "".join(parts) + decoder.decode(b"", final=True)

    def _fill(self, view: memoryview, deadline: float) -> None:
        """Raises EOFError, OSError."""
        while view:
            self._wait_until(deadline)
            count = self._channel.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]

    def _wait_until(self, deadline: float) -> None:
        """How long the next operation may block. Raises TimeoutError."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._channel.settimeout(left)

    def _ending(self) -> TemplateFailed:
        """It closed its end, and is as good as gone."""
        self.end()
        return stop_error("it takes too long") if self._process.returncode == -signal.SIGXCPU else _broken()


def _start_process() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Raises OSError."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                with_default_signals([sys.executable, "-I", "-S", "-X", "utf8", "-c", _PROGRAM, *_folders()]),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # Ctrl-C ends this process, which may have prompts to render until then
            )
    except BaseException:
        ours.close()
        raise
    return ours, process


def _folders() -> dict[str, None]:
    """Where what the worker imports was found here."""
    specs = [find_spec(name) for name in ("jinja2", "markupsafe")]
    theirs = [Path(spec.origin).parents[1] for spec in specs if spec is not None and spec.origin]
    return dict.fromkeys(map(str, [Path(__file__).parents[2], *theirs]))


def _unavailable(reason: str) -> Overloaded:
    return Overloaded(f"There is no process for the model's chat template ({reason}): try again later.")


class _Pool:
    """Workers of this process. Safe to use from several threads; blocks while all of them are busy."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._free: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def worker(self) -> Iterator[_Worker]:
        """One for this thread alone until the block ends. Ended if the block raises. Raises Overloaded."""
        worker = self._take()
        try:
            if worker is None or not worker.is_waiting:
                self._end(worker)
                worker = self._start()
            yield worker
        except BaseException:
            self._end(worker)
            self._give_back(None)
            raise
        self._give_back(worker)

    def close(self) -> None:
        """End those that are not in use. The others end with their question, or this process."""
        with self._changed:
            free, self._free = self._free, []
        for worker in free:
            self._end(worker)

    def after_fork(self) -> None:
        """Two processes with one worker would read each other's prompts."""
        for worker in self._workers:
            worker.abandon()
        self._reset()

    def _take(self) -> _Worker | None:
        """None: start another one."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or not self._taken, _PATIENCE_S)
            self._changed.wait_for(lambda: self._free or self._taken < MOST_WORKERS)
            self._taken += 1
            return self._free.pop() if self._free else None

    def _start(self) -> _Worker:
        worker = _Worker()
        self._workers.add(worker)
        return worker

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.end()
            self._workers.discard(worker)

    def _give_back(self, worker: _Worker | None) -> None:
        with self._changed:
            self._taken -= 1
            if worker and not worker.is_spent and len(self._free) < _KEPT:
                self._free.append(worker)
                worker = None
            self._changed.notify()
        self._end(worker)


def begin_worker() -> None:
    """Start a process for the templates that will soon be rendered. Returns at once; who needs it waits for it."""

    def start() -> None:
        with suppress(Overloaded), _POOL.worker():
            pass

    threading.Thread(target=start, name="template worker", daemon=True).start()


_POOL = _Pool()
atexit.register(_POOL.close)
os.register_at_fork(after_in_child=_POOL.after_fork)
