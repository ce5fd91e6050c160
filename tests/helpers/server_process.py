"""A server in a process of its own: started, asked, stopped, killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from types import TracebackType

import httpx

from emberkeep.types.request import Json
from helpers import slowing
from helpers.waiting import eventually

START_S = 240.0
_READY = re.compile(r"ready at (http://\S+)/v1")


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    detail: Json
    """The `emberkeep` object."""


class ServerProcess:
    """Runs `python *arguments`; killed at the end of its `with` block unless it has ended by then."""

    def __init__(self, *arguments: str) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        slowed = ("-m", "helpers.slowing") if slowing.MOST_S else ()
        self._process = subprocess.Popen(
            [sys.executable, *slowed, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._waitings: list[str] = []
        self._address = ""
        self._settled = threading.Event()
        """It is ready, or it has ended."""
        # Loading certificates for plain HTTP would take longer than most answers here.
        self.http = httpx.Client(verify=False, timeout=START_S)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Blocks until it is ready; fails when it ended instead."""
        assert self.gets_ready(), f"it did not start:\n{self.log}"
        return self._address

    @property
    def log(self) -> str:
        return "".join(self._waitings)

    def gets_ready(self) -> bool:
        """Blocks until it is ready, or has ended instead."""
        assert self._settled.wait(START_S), f"not ready after {START_S} s:\n{self.log}"
        return bool(self._address)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """`kill -9`: it has no chance to write anything more."""
        self._process.kill()
        self._process.wait()

    def hang_up(self) -> None:
        """As a terminal does that is closed."""
        self._process.send_signal(signal.SIGHUP)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """The polite way, after which everything is on disk."""
        self.terminate()
        assert self.exit_code() == 0, self.log

    def exit_code(self) -> int:
        """Blocks until it has ended and its last words are in `log`."""
        code = self._process.wait(START_S)
        self._reader.join()
        return code

    def chat(self, messages: list[Json], **fields: Json) -> Reply:
        """A greedy answer, all at once."""
        body = {"messages": messages, "temperature": 0, **fields}
        response = self.http.post(f"{self.url}/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return reply_of(response.json())

    def stats(self) -> Json:
        return self.http.get(f"{self.url}/v1/stats").json()

    def wait_until_stored(self) -> None:
        """The writer gives way to computation, and answering is computation."""
        assert eventually(self._is_stored, START_S), f"never stored: {self.stats()}"

    def _is_stored(self) -> bool:
        stats = self.stats()
        written, inserted = stats["store"]["cold"]["written_chunks"], stats["store"]["inserted_chunks"]
        return not stats["scheduler"]["active"] and bool(written == inserted)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._reader.join()
        self.http.close()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._waitings.append(line)
            if ready := _READY.search(line):
                self._address = ready[1]
                self._settled.set()
        self._settled.set()


def reply_of(answer: Json) -> Reply:
    usage = answer["usage"]
    return Reply(
        text=answer["choices"][0]["message"]["content"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        detail=answer["emberkeep"],
    )
