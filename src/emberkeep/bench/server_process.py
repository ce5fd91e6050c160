"""Servers to be measured, each in a process of its own: a real `emberkeep serve`, and a llama-server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from emberkeep.config.sources import ENV_PREFIX
from emberkeep.engine.llamacpp.context import available_cores
from emberkeep.errors import EmberkeepError
from emberkeep.signals import with_default_signals

_READY = re.compile(rb"(?:ready at|listening on) http://[^:]+:(\d+)")
_POLL_S = 0.02
_PEER_ENV_PREFIX = "LLAMA_"


class ServerUnderTest:
    """Starting blocks until it answers. Leaving the `with` block kills it, as a crash would."""

    def __init__(self, command: Sequence[str], log: Path, env_prefix: str) -> None:
        """Variables that begin with `env_prefix` do not reach it. Raises EmberkeepError if it does not start."""
        self._log = log
        env = {key: value for key, value in os.environ.items() if not key.startswith(env_prefix)}
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    with_default_signals(command), env=env, stdout=output, stderr=output
                )
        except OSError as error:
            raise EmberkeepError(f"{command[0]} cannot be run: {error.strerror}.") from error
        self.port = self._wait_until_ready()

    def kill(self) -> None:
        """SIGKILL: the server gets no chance to write anything. Calling it twice is harmless."""
        self._process.kill()
        self._process.wait()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The process stands still, so that it takes nothing from what is measured meanwhile."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def bytes_from_disk(self) -> int | None:
        """What the kernel fetched from storage for this process so far; None where it does not say."""
        try:
            lines = Path(f"/proc/{self._process.pid}/io").read_text().splitlines()
        except OSError:
            return None
        return int(dict(line.split(": ") for line in lines)["read_bytes"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _wait_until_ready(self) -> int:
        try:
            while not (found := _READY.search(self._log.read_bytes())):
                if self._process.poll() is not None:
                    text = self._log.read_text(errors="replace").strip()
                    raise EmberkeepError(f"The server to be measured did not start: {text}")
                time.sleep(_POLL_S)
        except BaseException:
            self.kill()
            raise
        return int(found[1])


class ServerProcess(ServerUnderTest):
    """Its settings come from a file of its own, so that nothing on this machine changes what is measured."""

    def __init__(
        self,
        model: Path,
        data_dir: Path,
        *,
        parallel: int,
        ctx: int | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:
        """`more`: other settings."""
        settings: dict[str, object] = {
            "model": str(model),
            "data_dir": str(data_dir),
            "port": 0,
            "parallel": parallel,
            "log_level": "warning",
            **(more or {}),
        }
        if ctx is not None:
            settings["ctx"] = ctx
        file = data_dir / "serve.json"
        file.write_text(json.dumps(settings))
        command = [sys.executable, "-P", "-m", "emberkeep", "serve", "--config", str(file)]
        super().__init__(command, data_dir / "serve.log", ENV_PREFIX)


class PeerProcess(ServerUnderTest):
    """A llama-server with settings that suit it, beside a `ServerProcess` of the same `parallel` and `ctx`.

    Its slots share one pool of cells, as ours do, and idle ones go to RAM; each of them may hold `ctx` tokens.
    """

    def __init__(
        self, program: Path, model: Path, folder: Path, *, parallel: int, ctx: int, more: Sequence[str] = ()
    ) -> None:
        places = ["--model", str(model), "--host", "127.0.0.1", "--port", "0", "--slot-save-path", str(folder)]
        self.flags = [*_peer_flags(parallel, ctx), *more]
        super().__init__([str(program), *places, *self.flags], folder / "peer.log", _PEER_ENV_PREFIX)


def _peer_flags(parallel: int, ctx: int) -> list[str]:
    sizes = {"--threads": available_cores(), "--parallel": parallel, "--ctx-size": parallel * ctx}
    numbers = [text for name, size in sizes.items() for text in (name, str(size))]
    return [*numbers, "--kv-unified", "--cache-reuse", "256"]


def peer_version(program: Path) -> str:
    """What the program says of itself. Raises EmberkeepError where it cannot be run."""
    try:
        done = subprocess.run(
            with_default_signals([str(program), "--version"]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise EmberkeepError(f"{program} cannot be run: {error.strerror}.") from error
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    return ", ".join(line for line in said if line.startswith(("version", "built with"))) or "version unknown"
