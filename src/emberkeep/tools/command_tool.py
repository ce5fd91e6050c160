"""A tool that runs programs: no shell, a time limit, and nothing that outlives it.

A process leaves its group and its session with one call, its parent by outliving it, and may start another one
without environment. What it does not lose by accident are its limits: each command gets a limit for the size of
files that no disk reaches and no other command has, and on Linux every process that has it is found in /proc. A
word in the environment says the same where such a limit cannot be set. Elsewhere only the process group can be
found.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import selectors
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import field
from enum import Enum
from pathlib import Path
from signal import Signals
from typing import Annotated, Literal

from pydantic import Field

from emberkeep.errors import ToolFailed
from emberkeep.signals import Leaving, with_default_signals
from emberkeep.text import decode_text
from emberkeep.tools.file_tools import Root, translate_errors
from emberkeep.tools.function import tool
from emberkeep.types.request import Json
from emberkeep.values import dataclass

_AT_ONCE = 4
_LONGEST_S = 2 * 86_400.0  # it ends by itself before, with what it has written until then
_PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")
_OPERATORS = frozenset(("|", "||", "&", "&&", ";", ">", ">>", "<", "<<", "2>", "2>&1", "&>"))

Signal = Literal["TERM", "INT", "HUP", "KILL"]


class CommandTool:
    def __init__(self, root: Path, timeout_s: float) -> None:
        """Commands start in `root` or below it, and may go anywhere this user may: it is no sandbox."""
        self._root = Root(root)
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_AT_ONCE, "emberkeep-command")

    @tool(group="command", dangerous=True, parallel=False, timeout_s=_LONGEST_S)
    async def run_command(
        self,
        command: Annotated[str | list[str], Field(description="Program and arguments, without shell syntax.")],
        cwd: Annotated[str, Field(description="Folder to run it in.")] = ".",
        stdin: Annotated[str, Field(description="Text that it reads.")] = "",
        timeout_s: Annotated[float, Field(gt=0, description="When to stop it.")] = 60,
        signal: Annotated[Signal, Field(description="What stops it first; KILL follows.")] = "TERM",
    ) -> Json:
        """Run a program and get its exit status and output. What it leaves running is ended with it."""
        program = ProcessCommand(
            argv=_argv(command),
            folder=self._folder(cwd),
            environment=_environment(os.environ),
            stdin=stdin.encode("utf-8", "replace"),
            timeout_s=min(timeout_s, self._timeout_s),
            signal=Signals[f"SIG{signal}"],
        )
        _check_program(program)
        return _report(await self._run(program), program)

    async def _run(self, command: ProcessCommand) -> ProcessResult:
        """Cancelling it ends the program, and returns when that is done."""
        stop = threading.Event()
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, run, command, stop)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                stop.set()
                await asyncio.wait([work])
                raise
        except OSError as error:
            raise ToolFailed(f"{command.argv[0]!r} cannot be started: {error.strerror or error}.") from error
        except (Leaving, KeyboardInterrupt):  # while it was being started
            stop.set()
            raise

    def _folder(self, cwd: str) -> Path:
        parts = self._root.parts(cwd)
        with translate_errors(cwd), self._root.folder(parts):
            return self._root.path.joinpath(*parts)


def _argv(command: str | list[str]) -> list[str]:
    """Raises ToolFailed."""
    try:
        argv = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise ToolFailed(f"The command cannot be split into words ({error}): give a list.") from error
    if isinstance(command, str) and not _OPERATORS.isdisjoint(argv):
        raise ToolFailed('There is no shell: run one program at a time, or ["sh", "-c", "..."].')
    if not argv or not argv[0]:
        raise ToolFailed("The command is empty: name a program.")
    if any("\0" in word for word in argv):
        raise ToolFailed("The command has a NUL character in it: leave it out.")
    try:
        os.fsencode("".join(argv))
    except UnicodeEncodeError:
        raise ToolFailed("The command is not Unicode text: write it in other characters.") from None
    return argv


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Only variables that programs need; none that could be a secret."""
    return {"PATH": os.defpath, **{name: ours[name] for name in _PASSED_ON if name in ours}, "TERM": "dumb"}


def _check_program(command: ProcessCommand) -> None:
    if os.name != "posix":
        raise ToolFailed("Commands can be run on Linux and macOS only.")
    name = command.argv[0]
    where = str(command.folder / name) if "/" in name else name
    if shutil.which(where, path=command.environment["PATH"]) is None:
        raise ToolFailed(f"There is no program {name!r} here: use another one.")


def _report(result: ProcessResult, command: ProcessCommand) -> Json:
    report: dict[str, Json] = {}
    if result.ending is ProcessEnding.TIMEOUT:
        report["stopped"] = f"it took longer than {command.timeout_s:g} s"
    elif result.ending is ProcessEnding.FLOOD:
        report["stopped"] = f"it wrote more than {FLOOD:,} bytes"
    if result.status < 0:
        report["signal"] = _signal_name(-result.status)
    else:
        report["exit"] = result.status
    report |= {"stdout": result.stdout, "stderr": result.stderr, "seconds": round(result.seconds, 2)}
    return report if result.is_gone else report | {"warning": "some of its processes could not be ended"}


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return str(number)  # a real-time signal


_KEPT = 32 << 10
FLOOD = 64 << 20
_CHUNK = 64 << 10
_LOOK_S = 0.05
_GRACE_S = 2.0
_SHORT_GRACE_S = 0.4
"""When no call waits for the answer any more."""


class ProcessEnding(Enum):
    BY_ITSELF = "by itself"
    TIMEOUT = "timeout"
    FLOOD = "flood"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ProcessCommand:
    argv: list[str]
    folder: Path
    environment: Mapping[str, str]
    stdin: bytes
    timeout_s: float
    signal: Signals
    """Sent first when it has to end."""


@dataclass(frozen=True, slots=True)
class ProcessResult:
    ending: ProcessEnding
    status: int
    """As subprocess has it: minus the signal that ended it."""
    stdout: str
    stderr: str
    seconds: float
    is_gone: bool
    """Nothing that it started is left."""


def run(command: ProcessCommand, stop: threading.Event) -> ProcessResult:
    """Blocks until the program and all that it started have ended. `stop` ends it early. Raises OSError."""
    begin = time.monotonic()
    with _start(command) as (program, tree):
        watch = _Watch(program, command.stdin, stop)
        ending = watch.until(begin + command.timeout_s)
        if ending is not ProcessEnding.BY_ITSELF:
            tree.send(command.signal)
            watch.until(time.monotonic() + (_SHORT_GRACE_S if stop.is_set() else _GRACE_S), to_the_end=True)
        # Also what a program left behind that ended as it should: nothing else would ever end it.
        is_gone = tree.kill()
        program.wait()
        watch.read_rest()
    seconds = time.monotonic() - begin
    return ProcessResult(ending, program.returncode, watch.stdout.text, watch.stderr.text, seconds, is_gone)


@contextmanager
def _start(command: ProcessCommand) -> Iterator[tuple[subprocess.Popen[bytes], ProcessTree]]:
    mark = ProcessMark()
    program = subprocess.Popen(
        with_default_signals(mark.wrap(command.argv)),
        bufsize=0,
        cwd=command.folder,
        env={**command.environment, **mark.environment},
        stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    tree = ProcessTree(program.pid, mark)
    try:
        yield program, tree
    finally:
        if program.returncode is None:
            tree.kill()
        with program:  # closes its pipes
            pass


class _Kept:
    """The beginning and the end of a stream."""

    def __init__(self) -> None:
        self.size = 0
        self._head = b""
        self._tail = b""

    def add(self, data: bytes) -> None:
        self.size += len(data)
        room = _KEPT - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-_KEPT:]

    @property
    def text(self) -> str:
        left_out = self.size - len(self._head) - len(self._tail)
        note = f"\n[{left_out:,} bytes left out]\n".encode() if left_out else b""
        text = decode_text(self._head + note + self._tail)
        return f"[binary, {self.size:,} bytes: not shown]" if text is None else text


class _Watch:
    def __init__(self, program: subprocess.Popen[bytes], stdin: bytes, stop: threading.Event) -> None:
        self.stdout, self.stderr = _Kept(), _Kept()
        self._program = program
        self._stop = stop
        self._unsent = memoryview(stdin)
        self._files = selectors.DefaultSelector()
        for pipe, kept in ((program.stdout, self.stdout), (program.stderr, self.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._files.register(pipe, selectors.EVENT_READ, kept)
        if program.stdin is not None:
            os.set_blocking(program.stdin.fileno(), False)
            self._files.register(program.stdin, selectors.EVENT_WRITE)

    def until(self, deadline: float, *, to_the_end: bool = False) -> ProcessEnding:
        """Why the watch ended; `to_the_end`: only when the program has, or the time is up."""
        while self._program.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return ProcessEnding.TIMEOUT
            if not to_the_end and self._stop.is_set():
                return ProcessEnding.CANCELLED
            if not to_the_end and self.stdout.size + self.stderr.size > FLOOD:
                return ProcessEnding.FLOOD
            self._wait(min(left, _LOOK_S))
        return ProcessEnding.BY_ITSELF

    def read_rest(self) -> None:
        """What is in the pipes now. Not to their end: one that could not be killed may hold them open."""
        while any(self._attend(key) for key, _ in self._files.select(0)):
            continue
        self._files.close()

    def _wait(self, seconds: float) -> None:
        if not self._files.get_map():
            with suppress(subprocess.TimeoutExpired):
                self._program.wait(seconds)
            return
        for key, _ in self._files.select(seconds):
            self._attend(key)

    def _attend(self, key: selectors.SelectorKey) -> bool:
        """Whether something came; a stream that has ended is closed."""
        return self._receive(key) if isinstance(key.data, _Kept) else self._send_input(key)

    def _receive(self, key: selectors.SelectorKey) -> bool:
        try:
            data = os.read(key.fd, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            key.data.add(data)
        else:
            self._files.unregister(key.fileobj)
        return bool(data)

    def _send_input(self, key: selectors.SelectorKey) -> bool:
        try:
            self._unsent = self._unsent[os.write(key.fd, self._unsent[:_CHUNK]) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:  # it does not want more
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._files.unregister(key.fileobj)
            assert self._program.stdin is not None
            self._program.stdin.close()
        return False


# ── all processes of one command ──

_PROC = Path("/proc")
_WORD = "EMBER_COMMAND"
_MOST_BLOCKS = 1 << 41  # 1 PiB: nothing is ever written that is refused because of it
_BLOCK = 1024  # or 512: shells do not agree
_ENDING_S = 5.0
_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """What every process of one command has, and no other process."""

    word: str = field(default_factory=lambda: secrets.token_hex(8))
    blocks: int = field(default_factory=lambda: _blocks())

    @property
    def environment(self) -> dict[str, str]:
        return {_WORD: self.word}

    def wrap(self, argv: list[str]) -> list[str]:
        """What to start, so that `argv` runs with the limit. The shell reads none of it, and is gone by then."""
        return ["/bin/sh", "-c", 'ulimit -S -f "$0" 2>/dev/null; exec "$@"', str(self.blocks), *argv]

    def is_on(self, pid: int) -> bool:
        """Whether it is a living process of this command."""
        folder = _PROC / str(pid)
        try:
            if _is_dead((folder / "stat").read_bytes()):
                return False
            is_limit = self._is_limit((folder / "limits").read_bytes())
            return is_limit or self._is_word((folder / "environ").read_bytes())
        except OSError:  # gone, or not ours
            return False

    def _is_limit(self, limits: bytes) -> bool:
        line = next((line for line in limits.splitlines() if line.startswith(b"Max file size")), b"")
        return any(b"%d" % (self.blocks * size) in line.split() for size in (_BLOCK, _BLOCK // 2))

    def _is_word(self, environ: bytes) -> bool:
        return f"{_WORD}={self.word}".encode() in environ.split(b"\0")


class ProcessTree:
    """A process that leads a group, and all that came of it. Methods block."""

    def __init__(self, leader: int, mark: ProcessMark) -> None:
        self._leader = leader
        self._mark = mark

    def send(self, number: Signals) -> bool:
        """To every one of them that lives. Whether any was found by its mark."""
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of the dead
            os.killpg(self._leader, number)
        seen: set[int] = set()
        found = False
        # While we looked, one may have started the next and ended.
        while new := _pids() - seen:
            seen |= new
            for pid in sorted(new):
                found |= self._mark.is_on(pid) and _send(pid, number)
        return found

    def kill(self) -> bool:
        """Until none is left. False where some do not end: the system is busy with them, or they are not ours."""
        deadline = time.monotonic() + _ENDING_S
        while self.send(Signals.SIGKILL):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True


def _blocks() -> int:
    """Below the limit in force, or all that have that one would be taken for ours."""
    import resource  # not on Windows

    now, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = _MOST_BLOCKS if now == resource.RLIM_INFINITY else min(now // _BLOCK, _MOST_BLOCKS)
    return most - 1 - secrets.randbelow(max(1, most // 8))


def _pids() -> set[int]:
    if sys.platform != "linux":
        return set()
    return {int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()}


def _send(pid: int, number: Signals) -> bool:
    """Whether it was still there. Numbers go round: one that was just seen is not another's a moment later."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs as another user
        return True
    return True


def _is_dead(stat: bytes) -> bool:
    """It only waits for its parent to notice."""
    return stat[stat.rindex(b")") + 2 :][:1] in (b"Z", b"X")
