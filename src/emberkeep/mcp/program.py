"""A server that is a program: its pipes, and its end together with everything it has started."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCError, JSONRPCMessage, JSONRPCResponse, jsonrpc_message_adapter

from emberkeep.config import McpServer
from emberkeep.mcp.text import cleaned, shortened
from emberkeep.mcp.variables import masked
from emberkeep.signals import with_default_signals

log = logging.getLogger("emberkeep.mcp")

MESSAGE_BYTES = 16 << 20
"""Longest message. Twice as much is buffered at most."""
_UNASKED = 10_000
"""So many messages that answer nothing, one after the other, are a flood."""
_LOGGED_BYTES = 256 << 10
_LINE_CHARS = 300
_GRACE_S = 1.0
"""For a program to end when its input does, and again after it was told to."""
_POLL_S = 0.01

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


@asynccontextmanager
async def program(
    server: McpServer, env: Mapping[str, str], on_end: Callable[[str], None]
) -> AsyncGenerator[Streams, None]:
    """Starts it; when this is left, neither it nor anything in its process group is alive.

    `on_end` gets the reason when it ends by itself, or has to be given up. Raises OSError.
    """
    process = await asyncio.create_subprocess_exec(
        *with_default_signals(server.command),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=get_default_environment() | dict(env),
        cwd=server.cwd,
        start_new_session=True,
        limit=MESSAGE_BYTES,
    )
    inward, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, outward = anyio.create_memory_object_stream[SessionMessage](0)
    errors = _Errors(server.name, env)

    async def read() -> None:
        on_end(await _read(process, inward, errors))

    try:
        async with inward, incoming, outgoing, outward, anyio.create_task_group() as tasks:
            tasks.start_soon(errors.follow, process)
            tasks.start_soon(read)
            tasks.start_soon(_write, process, outward)
            try:
                yield incoming, outgoing
            finally:
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process)


class _Errors:
    """What it writes to stderr: logged up to a limit, read without one so that it never blocks."""

    def __init__(self, name: str, env: Mapping[str, str]) -> None:
        self.last = ""
        self._name = name
        self._env = env

    async def follow(self, process: Process) -> None:
        assert process.stderr is not None
        left = _LOGGED_BYTES
        while chunk := await process.stderr.read(1 << 16):
            text = masked(cleaned(chunk.decode("utf-8", "replace")), self._env.values())
            lines = [shortened(line.strip(), _LINE_CHARS) for line in text.splitlines() if line.strip()]
            self.last = lines[-1] if lines else self.last
            for line in lines if left > 0 else ():
                log.debug("%s: %s", self._name, line)
            left -= len(chunk)


async def _read(
    process: Process, inward: MemoryObjectSendStream[SessionMessage | Exception], errors: _Errors
) -> str:
    """Passes on what it says until it says no more; the reason is returned."""
    assert process.stdout is not None
    unasked = 0
    while unasked <= _UNASKED:
        try:
            line = await process.stdout.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return await _ended(process, errors)
        except asyncio.LimitOverrunError:
            return f"it wrote a message of more than {MESSAGE_BYTES >> 20} MiB"
        message = _parsed(line)
        unasked = 0 if isinstance(message, (JSONRPCResponse, JSONRPCError)) else unasked + 1
        if message is not None:
            await inward.send(SessionMessage(message))
    return f"it wrote {_UNASKED} messages that nobody had asked for"


def _parsed(line: bytes) -> JSONRPCMessage | None:
    """None: something else, as programs print it by mistake."""
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        log.debug("not a message: %s", shortened(cleaned(line[:_LINE_CHARS].decode("utf-8", "replace")), 80))
        return None


async def _write(process: Process, outward: MemoryObjectReceiveStream[SessionMessage]) -> None:
    assert process.stdin is not None
    # A broken pipe is noticed by who reads.
    with suppress(OSError):
        async for sent in outward:
            text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


async def _ended(process: Process, errors: _Errors) -> str:
    await _within(_GRACE_S, lambda: process.returncode is not None)
    how = "it closed its output" if process.returncode is None else f"it ended with status {process.returncode}"
    return f"{how} ({errors.last})" if errors.last else how


async def _stop(process: Process) -> None:
    """Its input ends, then it is told to, then it and all of its group are killed."""
    assert process.stdin is not None
    process.stdin.close()
    await _within(_GRACE_S, lambda: process.returncode is not None)
    # Also where it has ended: what it started may not have.
    if _signalled(process, signal.SIGTERM):
        await _within(_GRACE_S, lambda: not _signalled(process, 0))
        _signalled(process, signal.SIGKILL)
        await _within(_GRACE_S, lambda: process.returncode is not None and not _signalled(process, 0))
    # asyncio has no other way to close pipes that a program outside of the group may still hold.
    process._transport.close()  # type: ignore[attr-defined]


def _signalled(process: Process, number: int) -> bool:
    """Whether there was anybody in the group, whose number is that of its first process."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody who may not be signalled is somebody
    return True


async def _within(seconds: float, is_so: Callable[[], bool]) -> None:
    """Returns when it is so, or when the time is over."""
    with anyio.move_on_after(seconds):
        while not is_so():
            await anyio.sleep(_POLL_S)
