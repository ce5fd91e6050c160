"""A real `emberkeep serve` in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from emberkeep.config.sources import ENV_PREFIX
from emberkeep.errors import EmberkeepError
from emberkeep.signals import with_default_signals

_READY = re.compile(rb"ready at http://[^:]+:(\d+)/")
_POLL_S = 0.02


class ServerProcess:
    """Starting blocks until it answers. Leaving the `with` block kills it, as a crash would.

    Its settings come from a file of its own, so that nothing on this machine changes what is measured.
    """

    def __init__(self, model: Path, data_dir: Path, *, parallel: int, ctx: int | None = None) -> None:
        settings: dict[str, object] = {
            "model": str(model),
            "data_dir": str(data_dir),
            "port": 0,
            "parallel": parallel,
        }
        settings["log_level"] = "warning"
        if ctx is not None:
            settings["ctx"] = ctx
        file = data_dir / "serve.json"
        file.write_text(json.dumps(settings))
        self._log = data_dir / "serve.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                with_default_signals([sys.executable, "-m", "emberkeep", "serve", "--config", str(file)]),
                env={key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)},
                stdout=log,
                stderr=log,
            )
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

    def __enter__(self) -> ServerProcess:
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
