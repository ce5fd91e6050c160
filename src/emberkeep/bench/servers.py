"""Servers to be measured, each in a process of its own: a real `emberkeep serve`, and a llama-server."""

from __future__ import annotations

import json
import os
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

from emberkeep.bench.http_client import BenchClient, Messages, Reply, chat_body, parse_stream
from emberkeep.bench.workspace import Workspace
from emberkeep.config.sources import ENV_PREFIX
from emberkeep.engine.llamacpp.threads import available_cores
from emberkeep.errors import EmberkeepError
from emberkeep.signals import with_default_signals

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
