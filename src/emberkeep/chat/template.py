"""A model's chat template: messages in, prompt text out.

A template out of a model file is foreign code, so it runs in a process (`chat/render_worker.py`) that is stopped
when it takes too long. One is started when it is first needed, and stays: it costs a tenth of a second and 25 MB
once, and each prompt a little more than it would here. It gets no file, no socket but its own and no secret of the
environment, and ends when this process does, because that closes the other end of its socket.
"""

from __future__ import annotations

import atexit
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
from queue import Empty, LifoQueue
from types import MappingProxyType
from typing import Final

from emberkeep.chat.messages import later_systems_in_users, system_in_first_user, tools_as_text, values_for
from emberkeep.chat.render_worker import (
    ANSWER_HEADER,
    MAX_OUTPUT,
    QUESTION_HEADER,
    AnswerKind,
    JinjaTemplate,
    Question,
    Wanted,
    stop_error,
)
from emberkeep.chat.traits import Traits, find_traits
from emberkeep.errors import Overloaded, TemplateFailed
from emberkeep.signals import with_default_signals
from emberkeep.types.request import Json, Message, Tool

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

NO_ARGS: Final[Mapping[str, Json]] = MappingProxyType({})

MAX_SECONDS = 2.0

MORE_SECONDS_PER_MESSAGE = 0.01
"""Some templates look at all messages again for each message."""


class ChatTemplate:
    """Immutable after construction; `render` may be called from any thread and blocks for at most seconds.

    A template out of a model file runs in a process of its own. Raises TemplateFailed when `source` is not a
    template or cannot be tried in time, and Overloaded when there can be no such process now.
    """

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        self.source = source
        self._specials = {"bos_token": bos, "eos_token": eos}
        self._own: JinjaTemplate | None = None
        if source == CHATML:  # ours is known to end, and needs no process
            self._own = JinjaTemplate(source)
            self.traits = find_traits(self._own.render, self._specials)
        else:
            self.traits = _traits(source, self._specials)

    @classmethod
    def default(cls, *, bos: str = "", eos: str = "") -> ChatTemplate:
        """For models that bring no template: ChatML, which most models have seen."""
        return cls(CHATML, bos=bos, eos=eos)

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
        traits = self.traits
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
        if self._own is not None:
            return self._own.render(values)
        return ask_worker("render", self.source, values, MAX_SECONDS + MORE_SECONDS_PER_MESSAGE * len(messages))


def _traits(source: str, specials: Mapping[str, str]) -> Traits:
    """Raises TemplateFailed, Overloaded."""
    try:
        return Traits.from_json(ask_worker("traits", source, specials, MAX_SECONDS))
    except ValueError as error:
        raise stop_error("what its process answered makes no sense") from error


MOST_WORKERS = 2
"""One may have a template that takes all its time; another one answers meanwhile."""

_START_S = 30.0

_SMALL = 1 << 16

_LONGEST_SENTENCE = 1000

_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Dates are to be the same, and some Pythons do not start without their libraries. The rest may hold secrets."""

_PROGRAM = "import sys; sys.path += sys.argv[1:]; from emberkeep.chat.render_worker import serve; serve()"


def ask_worker(wanted: Wanted, source: str, values: Mapping[str, Json], seconds: float) -> str:
    """What a worker says. Blocks for `seconds`, and while all workers are busy; any thread may call it.

    Raises TemplateFailed; Overloaded when no worker can be started.
    """
    question = _marshal((wanted, source, dict(values)))
    with _POOL.worker() as worker:
        kind, text = worker.ask(question, seconds)
    if kind is AnswerKind.TEXT:
        return text
    raise TemplateFailed(text[:_LONGEST_SENTENCE], "messages")


def begin_worker() -> None:
    """Start a process for the templates that will soon be rendered. Returns at once; who needs it waits for it."""

    def start() -> None:
        with suppress(Overloaded), _POOL.worker():
            pass

    threading.Thread(target=start, name="template worker", daemon=True).start()


def _marshal(question: Question) -> bytes:
    """Raises TemplateFailed where it holds something that is no JSON."""
    try:
        return marshal.dumps(question)
    except ValueError:
        pass  # subclasses, which are written as what they stand for
    try:
        wanted, source, values = question
        return marshal.dumps((wanted, source, json.loads(json.dumps(values))))
    except (TypeError, ValueError, RecursionError) as error:
        raise stop_error(f"it cannot be given these values ({error})") from error


# ── one process ──
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

    def ask(self, question: bytes, seconds: float) -> tuple[AnswerKind, str]:
        """Blocks for `seconds`. Raises TemplateFailed."""
        deadline = time.monotonic() + seconds
        header = QUESTION_HEADER.pack(seconds, len(question))
        try:
            self._wait_until(deadline)
            # In one part where copying costs little: each part would wake the other side.
            for part in [header + question] if len(question) < _SMALL else [header, question]:
                self._channel.sendall(part)
            kind, text = self._answer(deadline)
        except TimeoutError:
            raise stop_error("it takes too long") from None
        except OSError as error:
            raise self._ending() from error
        self.is_spent = kind is AnswerKind.SPENT
        return kind, text

    def end(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def abandon(self) -> None:
        """To the process that this one was forked from."""
        self._channel.close()
        self._process.returncode = 0  # not ours to wait for

    def _answer(self, deadline: float) -> tuple[AnswerKind, str]:
        """Raises TemplateFailed, OSError."""
        try:
            kind, size = ANSWER_HEADER.unpack(self._read(ANSWER_HEADER.size, deadline))
            if size > 4 * MAX_OUTPUT:
                raise _broken()
            return AnswerKind(kind), self._read(size, deadline).decode()
        except EOFError:
            raise self._ending() from None
        except ValueError as error:  # no answer, or no UTF-8
            raise _broken() from error

    def _read(self, size: int, deadline: float) -> bytearray:
        """Raises EOFError, OSError."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self._wait_until(deadline)
            count = self._channel.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return data

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


def _broken() -> TemplateFailed:
    return stop_error("it ended the process that it ran in")


def _unavailable(reason: str) -> Overloaded:
    return Overloaded(f"There is no process for the model's chat template ({reason}): try again later.")


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


# ── all of them ──
class _Pool:
    """Workers of this process. Safe to use from several threads; blocks while all of them are busy."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._workers: set[_Worker] = set()
        self._free: LifoQueue[_Worker | None] = LifoQueue()
        """The latest that was used comes first. None: one may be started."""
        for _ in range(MOST_WORKERS):
            self._free.put(None)

    @contextmanager
    def worker(self) -> Iterator[_Worker]:
        """One for this thread alone until the block ends. Ended if the block raises. Raises Overloaded."""
        worker, is_fit = self._free.get(), False
        try:
            if worker is None or not worker.is_waiting:
                self._end(worker)
                worker = None
                worker = _Worker()
                self._workers.add(worker)
            yield worker
            is_fit = not worker.is_spent
        finally:
            if not is_fit:
                self._end(worker)
            self._free.put(worker if is_fit else None)

    def close(self) -> None:
        """End those that are not in use. The others end with their question, or this process."""
        free: list[_Worker | None] = []
        with suppress(Empty):
            while True:
                free.append(self._free.get_nowait())
        for worker in free:
            self._end(worker)
            self._free.put(None)

    def after_fork(self) -> None:
        """Two processes with one worker would read each other's prompts."""
        for worker in self._workers:
            worker.abandon()
        self.reset()

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.end()
            self._workers.discard(worker)


_POOL = _Pool()

atexit.register(_POOL.close)

os.register_at_fork(after_in_child=_POOL.after_fork)
