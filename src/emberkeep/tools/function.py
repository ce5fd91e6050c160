"""A tool: a typed Python function, of which its schema is derived.

    @tool(group="harbour")
    def berth(ship: Annotated[str, Field(description="Its name.")], metres: int = 20) -> str:
        '''Find a free berth for a ship.'''

What it returns is the result: a text as it is, anything else as JSON. What it raises is one too.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import coroutine
from typing import Any, Protocol, TypeVar, overload

from emberkeep.backend.server_tools import ToolServer
from emberkeep.errors import ToolFailed
from emberkeep.signals import Leaving
from emberkeep.tools.schema import Signature, read_signature
from emberkeep.types.events import Caller
from emberkeep.types.request import Json, Tool
from emberkeep.values import dataclass

F = TypeVar("F", bound=Callable[..., Any])
Run = Callable[[Mapping[str, Json], Caller], Coroutine[Any, Any, Any]]

USER_GROUP = "user"
"""The group of tools that name no other."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A result with something to say to the user who watches."""

    value: Any
    remark: str


@dataclass(frozen=True, slots=True)
class ToolFunction:
    definition: Tool
    group: str
    run: Run
    """May raise anything: what it raises is what the model reads. Returns a text, what JSON can say, or
    `Answered`."""
    is_dangerous: bool = False
    """It can do harm: the user is asked first, or it is off where there is no user to ask."""
    runs_beside: bool = True
    """It may run while others do."""
    timeout_s: float | None = None
    """None: the usual one."""
    acts_as: Callable[[Mapping[str, Json]], ToolFunction] | None = None
    """The tool that a call with these arguments really runs, if it is another one."""
    allowed_by: str = ""
    """A setting that lets it run without asking."""
    only_reads: bool = False
    """It changes nothing, here or elsewhere: for programs that want to know before they call it."""

    @property
    def name(self) -> str:
        return self.definition.name

    def target(self, arguments: Mapping[str, Json]) -> ToolFunction:
        """The tool that has to be allowed for such a call: usually itself."""
        return self if self.acts_as is None else self.acts_as(arguments)


class ToolSource(Protocol):
    """Tools that come and go, such as those of a server. Belongs to the event loop."""

    async def start(self) -> None:
        """Returns when its tools are known, or will not be soon. Never raises."""

    def functions(self) -> Sequence[ToolFunction]:
        """Those that can be called now."""

    async def close(self) -> None: ...

    def servers(self) -> Sequence[ToolServer]:
        """From which they come, where they come from servers."""

    def withdrawn(self, name: str) -> str | None:
        """Why a tool that models may still know of cannot be called; None: it knows of none of that name."""


_MARK = "_emberkeep_tool"


@overload
def tool(
    function: F,
    /,
    *,
    group: str = USER_GROUP,
    name: str | None = None,
    dangerous: bool = False,
    parallel: bool = True,
    timeout_s: float | None = None,
    only_reads: bool = False,
) -> F: ...


@overload
def tool(
    *,
    group: str = USER_GROUP,
    name: str | None = None,
    dangerous: bool = False,
    parallel: bool = True,
    timeout_s: float | None = None,
    only_reads: bool = False,
) -> Callable[[F], F]: ...


def tool(
    function: Any = None,
    /,
    *,
    group: str = USER_GROUP,
    name: str | None = None,
    dangerous: bool = False,
    parallel: bool = True,
    timeout_s: float | None = None,
    only_reads: bool = False,
) -> Any:
    """Mark a function or a method as a tool. It stays what it is: `as_tool` makes the tool of it.

    `dangerous`: the user is asked before it runs. `parallel`: it may run while others do. `timeout_s`: its own.
    `only_reads`: it changes nothing, which MCP clients are told.
    """
    mark = partial(
        ToolFunction,
        group=group,
        is_dangerous=dangerous,
        runs_beside=parallel,
        timeout_s=timeout_s,
        only_reads=only_reads,
    )

    def apply(function: F) -> F:
        setattr(function, _MARK, (name, mark))
        return function

    return apply if function is None else apply(function)


def is_marked(value: object) -> bool:
    return isinstance(getattr(value, _MARK, None), tuple)


def as_tool(function: Callable[..., Any]) -> ToolFunction:
    """The tool that a function is: marked or not, a bound method too, blocking or a coroutine.

    A parameter of type `Caller` is not the model's to give. Raises ConfigError where a parameter has no type, or
    the function no docstring.
    """
    name, mark = getattr(function, _MARK, (None, partial(ToolFunction, group=USER_GROUP)))
    signature = read_signature(function, name)
    definition = Tool(signature.name, signature.description, signature.parameters)
    made: ToolFunction = mark(definition, run=_runner(function, signature))
    return made


def tools_of(owner: object) -> list[ToolFunction]:
    """Every marked method of an object, or every marked function of a module, in the order of their definition."""
    holders = [owner] if inspect.ismodule(owner) else reversed(type(owner).__mro__)
    names = {name: None for holder in holders for name, value in vars(holder).items() if is_marked(value)}
    return [as_tool(getattr(owner, name)) for name in names]


def _runner(function: Callable[..., Any], signature: Signature) -> Run:
    async def run(given: Mapping[str, Json], caller: Caller) -> Any:
        values = signature.arguments(given)
        if signature.caller is not None:
            values[signature.caller] = caller
        if inspect.iscoroutinefunction(function):
            return await function(**values)
        value = await in_thread(partial(function, **values))
        # A decorator may have hidden that it is a coroutine.
        return await value if inspect.isawaitable(value) else value

    return run


# ── how a tool is run ──


T = TypeVar("T")

MOST_LEFT = 16
"""Threads that still run though no call waits for them: Python cannot stop one."""
_GRACE_S = 6.0
"""What a coroutine gets to clean up: a program that it started has to be ended."""

_left: set[threading.Thread] = set()


class TookTooLong(Exception):
    """Not TimeoutError: that may be the tool's own."""


async def in_thread(call: Callable[[], T]) -> T:
    """Run what blocks. Cancelling it leaves its thread behind, which then neither holds up the loop nor the exit.

    Raises what it raises, and ToolFailed when too many were left behind.
    """
    _left.difference_update([thread for thread in _left if not thread.is_alive()])
    if len(_left) >= MOST_LEFT:
        raise ToolFailed(
            f"{MOST_LEFT} tools that took too long are still running: wait, or start Emberkeep again."
        )
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            settle = partial(_settle, done, context.run(call), None)
        except BaseException as error:
            settle = partial(_settle, done, None, _harmless(error))
        with suppress(RuntimeError):  # the loop is closed: no call waits any more
            loop.call_soon_threadsafe(settle)

    # Not of a pool: those are waited for when the program ends.
    thread = threading.Thread(target=work, name="emberkeep-tool", daemon=True)
    thread.start()
    try:
        return await done
    except asyncio.CancelledError:
        _left.add(thread)
        raise


def _settle(done: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(value)


def _harmless(error: BaseException) -> Exception:
    """As it can be raised in the event loop: some exceptions would end it, or confuse it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return ToolFailed(f"It ended with {type(error).__name__}{f': {error}' if str(error) else ''}.")


async def within(seconds: float, call: Coroutine[Any, Any, T]) -> T:
    """Raises TookTooLong after that time. A coroutine that goes on when it is cancelled is closed some seconds
    later, so none is left behind, whatever it does."""
    driven = _Driven(call)
    task: asyncio.Task[T] = asyncio.create_task(driven.run())
    task.add_done_callback(driven.finish)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_GRACE_S)
            raise TookTooLong
        return _result(task)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=_GRACE_S)
        raise
    finally:
        if not task.done():
            driven.close()
            task.cancel()


def _result(task: asyncio.Task[T]) -> T:
    if task.cancelled():
        raise ToolFailed("It cancelled itself.")
    return task.result()


class _Driven:
    """A coroutine that can be closed while it waits."""

    def __init__(self, call: Coroutine[Any, Any, Any]) -> None:
        self._call = call
        self._closes = False

    def close(self) -> None:
        """At the next cancellation."""
        self._closes = True

    def finish(self, task: asyncio.Task[Any]) -> None:
        self._call.close()  # it may never have begun
        if not task.cancelled():
            task.exception()  # or asyncio complains that the error was not looked at

    async def run(self) -> Any:
        try:
            return await self._steps()
        except Leaving:
            raise
        except SystemExit as error:
            raise _harmless(error) from error

    @coroutine
    def _steps(self) -> Generator[Any, Any, Any]:
        step = partial(self._call.send, None)
        while True:
            try:
                waits_for = step()
            except StopIteration as done:
                return done.value
            try:
                step = partial(self._call.send, (yield waits_for))
            except BaseException as error:
                if self._closes:
                    with suppress(Exception):
                        self._call.close()
                    raise
                step = partial(self._call.throw, error)
