"""A server in a process of its own: started as a person would, asked, stopped, killed, started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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

    def __exit__(self, *_: object) -> None:
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


_LAST_LINES = 80


class ServerLives:
    """Starts a process when one is needed and none runs; what is left is killed at the end of its `with` block."""

    def __init__(self, start: Callable[[], ServerProcess]) -> None:
        self._start = start
        self._lives: list[ServerProcess] = []

    @property
    def now(self) -> ServerProcess:
        """The process that runs; blocks until it is ready where it had to be started."""
        if not self._lives or self._lives[-1].has_ended:
            self._lives.append(self._start())
            assert self._lives[-1].url
        return self._lives[-1]

    @property
    def log(self) -> str:
        """The last lines of every life."""
        logs = (life.log.splitlines(keepends=True)[-_LAST_LINES:] for life in self._lives)
        return "─ another life ─\n".join("".join(lines) for lines in logs)

    def __enter__(self) -> ServerLives:
        return self

    def __exit__(self, *_: object) -> None:
        for life in self._lives:
            life.__exit__(*_)


RULES = "You are the careful secretary of a small harbour. " + " ".join(
    f"Rule {i}: ships of type {i} wait at pier {i * 7 % 13} and pay {i * 3 + 2} coins." for i in range(1, 25)
)
"""About 600 tokens that every agent would send with every call."""
STEADY = ("--flash-attention", "on")
"""Options of a server whose answers are compared: else it changes between two of them to the attention that is
quicker here, which rounds otherwise. The last token of a prompt also rounds otherwise beside all others than
alone, as after a reuse: the first answer to a question is compared with no other one."""


def serve(model: Path | str, data_dir: Path, *options: str) -> ServerProcess:
    """On a free port, unless the options name one."""
    return ServerProcess(
        *("-m", "emberkeep", "serve", "--port", "0", "--model", str(model)),
        *("--data-dir", str(data_dir), *options),
    )


def system(text: str = RULES) -> Json:
    return {"role": "system", "content": text}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str) -> Json:
    return {"role": "assistant", "content": text}
