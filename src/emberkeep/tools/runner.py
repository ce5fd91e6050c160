"""Runs foreign functions so that they can neither block the event loop nor end the program."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from types import coroutine
from typing import Any, TypeVar

from emberkeep.errors import ToolFailed
from emberkeep.signals import Leaving

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
