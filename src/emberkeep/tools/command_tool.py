"""A tool that runs programs: no shell, a time limit, and nothing that outlives it."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import Signals
from typing import Annotated, Literal

from pydantic import Field

from emberkeep.errors import ToolFailed
from emberkeep.signals import Leaving
from emberkeep.tools.file_root import Root, translate_errors
from emberkeep.tools.function import tool
from emberkeep.tools.process import FLOOD, ProcessCommand, ProcessEnding, ProcessResult, run
from emberkeep.types.request import Json

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
