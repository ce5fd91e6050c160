"""Servers to be measured, each in a process of its own: a real `emberkeep serve`, and a llama-server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from http.client import OK, HTTPConnection, HTTPException
from pathlib import Path
from time import monotonic, perf_counter
from typing import Self

from emberkeep.bench.workspace import Workspace
from emberkeep.config.sources import ENV_PREFIX
from emberkeep.engine.llamacpp.threads import available_cores
from emberkeep.errors import EmberkeepError
from emberkeep.signals import with_default_signals
from emberkeep.types.request import Json
from emberkeep.values import dataclass

OURS, PEER = "emberkeep", "llama-server"
_POLL_S = 0.005
_PATIENCE_S = 300.0
_SETTINGS_OF_OTHERS = (ENV_PREFIX, "LLAMA_")
_SLOT, _SAVED = 0, "slot.bin"


class ServerUnderTest:
    """A process that serves HTTP. Making one blocks until `/health` says that it is ready; leaving the `with`
    block kills it, as a crash would."""

    name = "server"

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        """`--port` and a free one are added to `command`. `env` is added to the environment, of which settings of
        servers are left out. Raises EmberkeepError if it does not start."""
        self._command, self._log, self._env = command, log, env or {}
        self.start()

    @property
    def client(self) -> BenchClient:
        return BenchClient(self.port)

    def start(self) -> None:
        """Again, after it was killed. Blocks. Raises EmberkeepError."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_SETTINGS_OF_OTHERS)}
        program = with_default_signals([*self._command, "--port", str(self.port)])
        self._begin = monotonic()
        try:
            with self._log.open("wb") as log:
                self.process = subprocess.Popen(program, env={**inherited, **self._env}, stdout=log, stderr=log)
        except OSError as error:
            raise EmberkeepError(f"{self._command[0]} cannot be run: {error.strerror}.") from error
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def age(self) -> float:
        """Seconds since it was started."""
        return monotonic() - self._begin

    def kill(self) -> None:
        """SIGKILL: the server gets no chance to write anything. Calling it twice is harmless."""
        self.process.kill()
        self.process.wait()

    async def settle(self) -> None:
        """Returns when it has nothing left to do in the background, which would disturb another server."""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The process stands still: threads of an idle server may spin, and take the cores of what is measured."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _wait_until_ready(self) -> None:
        while self._health() != OK:
            if self.process.poll() is not None:
                text = self._log.read_text(errors="replace").strip()
                raise EmberkeepError(f"The server to be measured did not start: {text}")
            if self.age() > _PATIENCE_S:
                raise EmberkeepError(f"The server to be measured was not ready within {_PATIENCE_S:.0f} s.")
            time.sleep(_POLL_S)
        self.ready_s = self.age()

    def _health(self) -> int:
        """A status of HTTP; 0 as long as it does not listen."""
        with (
            suppress(OSError, HTTPException),
            closing(HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE_S)) as connection,
        ):
            connection.request("GET", "/health")
            return connection.getresponse().status
        return 0


class OwnServer(ServerUnderTest):
    name = OURS

    def __init__(
        self,
        workspace: Workspace,
        data_dir: Path | None = None,
        *,
        parallel: int | None = None,
        ctx: int | None = None,
        more: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Its settings, `more` of them last, come from a file of its own: nothing on this machine changes what is
        measured, and None is a default. `data_dir`: what another one has left (default: a new one)."""
        self.data_dir = data_dir or workspace.new_data_dir()
        places = {"model": str(workspace.model), "data_dir": str(self.data_dir)}
        sizes = {name: size for name, size in (("parallel", parallel), ("ctx", ctx)) if size is not None}
        file = self.data_dir / "serve.json"
        file.write_text(json.dumps({**places, **sizes, "log_level": "warning", **(more or {})}))
        command = [sys.executable, "-P", "-m", "emberkeep", "serve", "--config", str(file)]
        super().__init__(command, self.data_dir / "serve.log", env)

    async def settle(self) -> None:
        await self.client.wait_until_settled()

    async def resume(self, messages: Messages, max_tokens: int) -> Reply:
        """Kill it, start it and ask what it was asked last. Starting is not timed; bringing its state back is."""
        await self.settle()
        self.kill()
        drop_from_page_cache(chunk_files(self.data_dir))
        self.start()
        return await self.client.chat(messages, max_tokens)


class PeerServer(ServerUnderTest):
    """A llama-server with settings that suit it, beside an `OwnServer` of the same `parallel` and `ctx`.

    Its slots share one pool of cells, as ours do, and idle ones go to RAM; each of them may hold `ctx` tokens.
    """

    name = PEER

    def __init__(
        self, workspace: Workspace, program: Path, *, parallel: int, ctx: int, more: Sequence[str] = ()
    ) -> None:
        self._folder = workspace.new_data_dir()
        sizes = {"--threads": available_cores(), "--parallel": parallel, "--ctx-size": parallel * ctx}
        numbers = [text for name, size in sizes.items() for text in (name, str(size))]
        self.flags = [*numbers, "--kv-unified", "--cache-reuse", "256", *more]
        places = ["--model", str(workspace.model), "--host", "127.0.0.1", "--slot-save-path", str(self._folder)]
        super().__init__([str(program), *places, *self.flags], self._folder / "peer.log")

    async def resume(self, messages: Messages, max_tokens: int) -> Reply:
        """Its client saves the slot before and restores it afterwards; cold where it can do neither."""
        body = {**chat_body(messages, max_tokens), "id_slot": _SLOT}
        await self.client.post("/v1/chat/completions", body)
        is_saved = await self._slot("save")
        self.kill()
        if is_saved:
            drop_from_page_cache([self._folder / _SAVED])
        self.start()
        begin = perf_counter()
        if is_saved:
            await self._slot("restore")
        restored_ms = 1e3 * (perf_counter() - begin)
        reply = parse_stream(await self.client.post("/v1/chat/completions", body))
        return replace(reply, ttft_ms=restored_ms + reply.ttft_ms)

    async def _slot(self, action: str) -> bool:
        """Whether it was done: models with recurrent layers and old versions cannot."""
        with suppress(EmberkeepError):
            (await self.client.post(f"/slots/{_SLOT}?action={action}", {"filename": _SAVED})).body()
            return True
        return False


ComparedServer = OwnServer | PeerServer


def chunk_files(data_dir: Path) -> list[Path]:
    return sorted(data_dir.glob("kv/*/chunks/*/*.kv"))


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Forces them to disk first, because only clean pages can be dropped. Does nothing on systems without it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def peer_version(program: Path) -> str:
    """What the program says of itself. Raises EmberkeepError where it cannot be run."""
    version_command = with_default_signals([str(program), "--version"])
    try:
        done = subprocess.run(
            version_command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        raise EmberkeepError(f"{program} cannot be run: {error.strerror}.") from error
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    return ", ".join(line for line in lines if line.startswith(("version", "built with"))) or "version unknown"


@contextmanager
def alone(server: ServerUnderTest | None, servers: Iterable[ServerUnderTest]) -> Iterator[None]:
    """All others among `servers` stand still meanwhile."""
    with ExitStack() as paused:
        for other in servers:
            if other is not server:
                paused.enter_context(other.pause())
        yield


# ── a client that shares the cores with what it measures: it collects bytes and times, and parses afterwards ──

Messages = Sequence[Mapping[str, str]]

_FIRST_TOKEN = re.compile(rb'"(?:content|text)": ?"[^"]')
"""An event that carries text; a role or a report of progress is none."""
STATS = "/v1/stats"
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TimedExchange:
    """One request and everything that came back. Times are on the performance counter, in seconds."""

    sent: float
    first: float
    """When the first byte of the first event with text was here; the end, if there was none."""
    ended: float
    raw: bytes

    def body(self) -> bytes:
        """Raises EmberkeepError when the server answered with an error."""
        head, _, body = self.raw.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            body = b"".join(_chunks(body))
        if not head.startswith(b"HTTP/1.1 200"):
            raise EmberkeepError(f"The server under test answered with an error: {body.decode(errors='replace')}")
        return body


@dataclass(frozen=True, slots=True)
class Reply:
    """A generation: its text, and what the server says of it."""

    ttft_ms: float
    text: str
    usage: Mapping[str, Json]
    timings: Mapping[str, Json]
    detail: Mapping[str, Json]
    """The `emberkeep` object, which other servers do not send."""

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def completion_tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def tier(self) -> str:
        """Where most of what was reused came from: `hot`, `warm`, `cold`, `remote` or `-`."""
        reused = self.detail.get("reused", {})
        most = max(reused, key=lambda tier: reused[tier], default="-")
        return most if reused.get(most) else "-"


class BenchClient:
    """Every request opens a connection before its clock starts. Raises EmberkeepError for failed requests."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def chat(self, messages: Messages, max_tokens: int) -> Reply:
        return parse_stream(await self.post("/v1/chat/completions", chat_body(messages, max_tokens)))

    async def prompt_tokens(self, messages: Messages) -> list[int]:
        """The token ids that a fresh conversation with these messages is evaluated as."""
        prompt = json.loads((await self.post("/apply-template", {"messages": messages})).body())["prompt"]
        return await self.tokenize(prompt)

    async def tokenize(self, text: str) -> list[int]:
        return list(json.loads((await self.post("/tokenize", {"content": text})).body())["tokens"])

    async def wait_until_settled(self) -> dict[str, Json]:
        """Wait until nothing runs and everything computed is on disk; the stats at that moment."""
        while not is_settled(stats := await self.get(STATS)):
            await asyncio.sleep(_POLL_S)
        return dict(stats)

    async def get(self, path: str) -> Json:
        return json.loads((await self._exchange("GET", path, b"")).body())

    async def post(self, path: str, body: Json) -> TimedExchange:
        return await self._exchange("POST", path, json.dumps(body).encode())

    async def _exchange(self, method: str, path: str, body: bytes) -> TimedExchange:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            sent = perf_counter()
            writer.write(head.encode() + body)
            return await _read(reader, writer.get_extra_info("socket"), sent)
        finally:
            writer.close()


def chat_body(messages: Messages, max_tokens: int) -> dict[str, Json]:
    return {"messages": messages, **greedy(max_tokens)}


def completion_body(prompt: Sequence[int], max_tokens: int) -> dict[str, Json]:
    return {"prompt": list(prompt), **greedy(max_tokens)}


def greedy(max_tokens: int) -> dict[str, Json]:
    usage = {"stream_options": {"include_usage": True}}
    return {"max_tokens": max_tokens, "temperature": 0, "stream": True, **usage}


def parse_stream(exchange: TimedExchange) -> Reply:
    """An answer of our server or of a llama-server. Raises EmberkeepError when the stream ended with an error."""
    frames = list(_frames(exchange.body()))
    failed = [frame["error"]["message"] for frame in frames if "error" in frame]
    if failed:
        raise EmberkeepError(f"The server under test failed in the middle of an answer: {failed[0]}")
    if not frames:
        raise EmberkeepError(f"The server under test answered without a frame: {exchange.body()[:200]!r}")
    details = (frame["emberkeep"] for frame in frames if "timings" in frame and "emberkeep" in frame)
    return Reply(
        ttft_ms=1e3 * (exchange.first - exchange.sent),
        text="".join(_text(frame) for frame in frames),
        usage=frames[-1]["usage"],
        timings=frames[-1]["timings"],
        detail=next(details, {}),
    )


async def burst(client: BenchClient, requests: Sequence[tuple[str, Json]]) -> float:
    """Posts these bodies to these paths at once. Returns tokens per second, from the first request to the last
    byte."""
    exchanges = await asyncio.gather(*(client.post(path, body) for path, body in requests))
    seconds = max(e.ended for e in exchanges) - min(e.sent for e in exchanges)
    return sum(parse_stream(exchange).completion_tokens for exchange in exchanges) / seconds


def is_settled(stats: Mapping[str, Json]) -> bool:
    """Nothing runs, and every chunk inserted so far has been written or refused."""
    scheduler, store = stats["scheduler"], stats["store"]
    at_work = scheduler["active"] + scheduler["waiting"] + store["cold"]["pending_chunks"]
    through = store["cold"]["written_chunks"] + store["cold"]["refused_chunks"]
    return bool(at_work == 0 and through >= store["inserted_chunks"])


async def _read(reader: asyncio.StreamReader, connection: socket.socket, sent: float) -> TimedExchange:
    raw, first = bytearray(), 0.0
    while data := await reader.read(_READ_BYTES):
        now = perf_counter()
        raw += data
        if not first and _FIRST_TOKEN.search(raw):
            first = now
            # Woken for every token, a client would take the server's cores from it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _READ_BYTES // 2)
    ended = perf_counter()
    return TimedExchange(sent, first or ended, ended, bytes(raw))


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        yield body[:length]
        body = body[length + 2 :]


def _frames(body: bytes) -> Iterator[dict[str, Json]]:
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            yield json.loads(line[len("data: ") :])


def _text(frame: Mapping[str, Json]) -> str:
    """The text in a frame of a chat or of a completion."""
    parts = [choice.get("delta", choice) for choice in frame.get("choices", ())]
    return "".join(part.get("content") or part.get("text") or "" for part in parts)
