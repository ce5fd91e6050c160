"""Which files of the package run for a chat completion: `python tests/helpers/request_line.py MODEL.gguf`.

A real server answers turns of a conversation while every call in every thread is noted: from the body to the first
frame, and on until the chunk is on disk. Prints JSON.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, cast

import httpx

import emberkeep

if TYPE_CHECKING:  # what is imported before the calls are noted is as good as any
    from emberkeep.backend.local import LocalBackend

ROOT = f"{Path(emberkeep.__file__).parent}/"
WRITES_FRAMES = ("server/stream.py", "_part")


class CallLog:
    """Files of the package in which something was called, while it is on."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.until_first_frame: set[str] = set()
        self.is_on = False

    def take(self) -> tuple[set[str], set[str]]:
        """Files until the first frame, and all. Switches it off, and forgets them."""
        self.is_on = False
        first, seen = self.until_first_frame, self.seen
        self.until_first_frame, self.seen = set(), set()
        return first, seen

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not (self.is_on and event == "call" and code.co_filename.startswith(ROOT)):
            return
        file = code.co_filename.removeprefix(ROOT)
        self.seen.add(file)
        if (file, code.co_name) == WRITES_FRAMES and not self.until_first_frame:
            self.until_first_frame = set(self.seen)


def main(model: str, folder: str) -> dict[str, list[str]]:
    calls = CallLog()
    threading.setprofile(calls.note)
    sys.setprofile(calls.note)
    from emberkeep.backend.models import Models
    from emberkeep.config.settings import Config
    from emberkeep.runtime.served_models import open_backend
    from emberkeep.server.app import create_app
    from emberkeep.server.http_server import Server
    from emberkeep.server.lifecycle import run_until_stopped

    config = Config(data_dir=Path(folder), model=model)
    backend = cast("LocalBackend", open_backend(config))
    listener = socket.create_server(("127.0.0.1", 0))
    ready = threading.Event()
    models = Models(backend)
    server = Server(create_app(models, config), config)
    turns: list[tuple[set[str], set[str]]] = []

    def talk() -> None:
        sys.setprofile(None)  # this is the client
        ready.wait()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
                messages = [{"role": "system", "content": "Be kind."}]
                for question in ("Who is there?", "And now?", "What next?", "And then?", "Why?"):
                    messages.append({"role": "user", "content": question})
                    messages.append({"role": "assistant", "content": _ask(client, messages, calls)})
                    _settle(backend)
                    turns.append(calls.take())
        finally:
            server.stop()

    threading.Thread(target=talk, daemon=True).start()
    run_until_stopped(server, models, listener, ready.set)
    # What ran for all of them: housekeeping comes now and then, and a busy machine may be further at times.
    first, last = (set.intersection(*sets) for sets in zip(*turns[1:], strict=True))
    return {"to_the_first_frame": sorted(first), "to_the_durable_chunk": sorted(last)}


def _settle(backend: LocalBackend) -> None:
    """Wait until the end of the turn is stored."""
    while backend.scheduler.call(lambda: backend.scheduler.stats()["active"]).result():
        pass
    backend.scheduler.store.flush()


def _ask(client: httpx.Client, messages: list[dict[str, str]], calls: CallLog) -> str:
    """Its answer. `calls` stays on."""
    body = json.dumps({"messages": messages, "stream": True, "max_tokens": 64, "temperature": 0}).encode()

    def content() -> Iterator[bytes]:
        calls.is_on = True  # the connection and the headers are behind it
        yield body

    headers = {"Content-Type": "application/json"}
    with client.stream("POST", "/v1/chat/completions", content=content(), headers=headers) as frames:
        lines = [line.removeprefix("data: ") for line in frames.iter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(main(sys.argv[1], scratch), indent=1))
