"""Ways to a server: the pipes of a program, which ends together with everything it has started, or streamable HTTP
to an address. Messages of both have a bearable length."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client._transport import TransportStreams
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCError, JSONRPCMessage, JSONRPCResponse, jsonrpc_message_adapter

from emberkeep.config.tables import McpServer
from emberkeep.errors import ConfigError
from emberkeep.signals import with_default_signals
from emberkeep.text import shorten, strip_hidden

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
_CONNECT_S = 30.0

_VARIABLE = re.compile(r"\$(?:(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})")
_MASK = "***"
_SECRET_CHARS = 8
"""Shorter values are too common in ordinary text to be masked there, and no keys."""

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


@asynccontextmanager
async def stdio_transport(
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
            text = mask_secrets(strip_hidden(chunk.decode("utf-8", "replace")), self._env.values())
            lines = [shorten(line.strip(), _LINE_CHARS) for line in text.splitlines() if line.strip()]
            self.last = lines[-1] if lines else self.last
            for line in lines if left > 0 else ():
                log.debug("%s: %s", self._name, line)
            left -= len(chunk)


async def _read(
    process: Process, inward: MemoryObjectSendStream[SessionMessage | Exception], errors: _Errors
) -> str:
    """Pass its messages on until it ends; returns the reason."""
    assert process.stdout is not None
    unasked = 0
    while unasked <= _UNASKED:
        try:
            line = await process.stdout.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return await _describe_end(process, errors)
        except asyncio.LimitOverrunError:
            return f"it wrote a message of more than {MESSAGE_BYTES >> 20} MiB"
        message = _parse(line)
        unasked = 0 if isinstance(message, (JSONRPCResponse, JSONRPCError)) else unasked + 1
        if message is not None:
            await inward.send(SessionMessage(message))
    return f"it wrote {_UNASKED} messages that were not asked for"


def _parse(line: bytes) -> JSONRPCMessage | None:
    """None: it is no message; programs print other lines by mistake."""
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        log.debug("not a message: %s", shorten(strip_hidden(line[:_LINE_CHARS].decode("utf-8", "replace")), 80))
        return None


async def _write(process: Process, outward: MemoryObjectReceiveStream[SessionMessage]) -> None:
    assert process.stdin is not None
    # A broken pipe is noticed by the task that reads.
    with suppress(OSError):
        async for sent in outward:
            text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


async def _describe_end(process: Process, errors: _Errors) -> str:
    await _wait_until(_GRACE_S, lambda: process.returncode is not None)
    how = "it closed its output" if process.returncode is None else f"it ended with status {process.returncode}"
    return f"{how} ({errors.last})" if errors.last else how


async def _stop(process: Process) -> None:
    """Its input ends, then it is told to, then it and all of its group are killed."""
    assert process.stdin is not None
    process.stdin.close()
    await _wait_until(_GRACE_S, lambda: process.returncode is not None)
    # Also where it has ended: what it started may not have.
    if _signal_group(process, signal.SIGTERM):
        await _wait_until(_GRACE_S, lambda: not _signal_group(process, 0))
        _signal_group(process, signal.SIGKILL)
        await _wait_until(_GRACE_S, lambda: process.returncode is not None and not _signal_group(process, 0))
    # asyncio has no other way to close pipes that a program outside of the group may still hold.
    process._transport.close()  # type: ignore[attr-defined]


def _signal_group(process: Process, number: int) -> bool:
    """Whether there was a process in the group, whose number is that of its first process."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process that may not be signalled is one too
    return True


async def _wait_until(seconds: float, holds: Callable[[], bool]) -> None:
    """Returns when it holds, or when the time is over."""
    with anyio.move_on_after(seconds):
        while not holds():
            await anyio.sleep(_POLL_S)


# ── a server that has an address ──


@asynccontextmanager
async def http_transport(
    server: McpServer, headers: Mapping[str, str], on_status: Callable[[int], None]
) -> AsyncGenerator[TransportStreams, None]:
    """Leaving it ends the session. `on_status` gets the status of every answer."""
    assert server.url is not None

    async def look(response: httpx2.Response) -> None:
        on_status(response.status_code)
        _bound(response)

    client = httpx2.AsyncClient(
        headers={**headers, "Accept-Encoding": "identity"},
        # Waiting is bounded per call; a stream for notices may be silent for hours.
        timeout=httpx2.Timeout(_CONNECT_S, read=None),
        event_hooks={"response": [look]},
    )
    async with (
        client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=MESSAGE_BYTES) as streams,
    ):
        yield streams


def _bound(response: httpx2.Response) -> None:
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    if response.headers.get("content-encoding", "identity") != "identity":
        # A few bytes could become gigabytes.
        response.stream = _Bounded(response.stream, 0, "it is compressed, which was not asked for")
    elif not response.headers.get("content-type", "").startswith("text/event-stream"):
        response.stream = _Bounded(response.stream, MESSAGE_BYTES, f"it is longer than {MESSAGE_BYTES >> 20} MiB")


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, limit: int, complaint: str) -> None:
        self._stream = stream
        self._limit = limit
        self._complaint = complaint

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._limit
        async for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                # The SDK fails the call with it, and goes on.
                raise httpx2.StreamError(self._complaint)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


# ── `$NAME` in a server's settings, and keeping what it stands for out of logs ──


def expand_variables(values: Mapping[str, str]) -> dict[str, str]:
    """With variables replaced by what they hold now. Raises ConfigError for one that is not set."""
    return {key: _VARIABLE.sub(_value, value) for key, value in values.items()}


def mask_secrets(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted((s for s in secrets if len(s) >= _SECRET_CHARS), key=len, reverse=True):
        text = text.replace(secret, _MASK)
    return text


def _value(match: re.Match[str]) -> str:
    name = match["name"] or match["braced"]
    try:
        return os.environ[name]
    except KeyError as error:
        raise ConfigError(f"The variable {name} is not set: set it, or remove it from the settings.") from error
