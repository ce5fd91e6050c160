"""A program that answers as llama-server does: it counts words as tokens and remembers what it was sent.

Its speed is scripted too: `predicted_ms` is what a test can compute, and not a measurement. With drafts half of an
answer is accepted, and it takes half of the time. It knows every way to draft but `ngram-cache`.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
STEP_MS = 10.0
SAID = " and"
VERSION = "version: 7 (scripted)"


def install(folder: Path) -> Path:
    """The program as a file that can be run."""
    program = folder / "llama-server"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from helpers.scripted_llama_server import main\nmain(sys.argv[1:])\n"
    )
    program.chmod(0o755)
    return program


class Memory:
    """What a server has been asked: the longest common beginning is what it reuses."""

    def __init__(self) -> None:
        self.prompts: list[list[str]] = []

    def take(self, prompt: list[str]) -> int:
        reused = max((_common(prompt, known) for known in self.prompts), default=0)
        self.prompts.append(prompt)
        return min(reused, len(prompt) - 1)


def _common(one: list[str], other: list[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Handler(BaseHTTPRequestHandler):
    memory = Memory()
    folder = Path()
    drafts = False

    def do_GET(self) -> None:
        self._json({"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        url = urlsplit(self.path)
        if url.path.startswith("/slots/"):
            self._json(self._slot(self.folder / body["filename"], url.query))
        elif url.path == "/tokenize":
            self._json({"tokens": [len(word) for word in body["content"].split()]})
        else:
            self._stream(body)

    def _slot(self, file: Path, action: str) -> dict[str, object]:
        if action == "action=save":
            file.write_text(json.dumps(self.memory.prompts[-1]))
        else:
            self.memory.prompts.append(json.loads(file.read_text()))
        return {"id_slot": 0}

    def _stream(self, body: dict[str, object]) -> None:
        words, length = _prompt_of(body), int(str(body["max_tokens"]))
        reused = self.memory.take(words)
        spelled = {"text": SAID} if "prompt" in body else {"delta": {"content": SAID}}
        frames = [{"choices": [spelled]} for _ in range(length)]
        usage = {
            "prompt_tokens": len(words),
            "completion_tokens": length,
            "prompt_tokens_details": {"cached_tokens": reused},
        }
        drafts = self.drafts and body.get("speculation") is not False
        drafted = {"draft_n": 2 * length, "draft_n_accepted": length // 2} if drafts else {}
        predicted_ms = STEP_MS * (length - 1) / (2 if drafts else 1)
        timings = {"cache_n": reused, "predicted_n": length, "predicted_ms": predicted_ms, **drafted}
        frames.append({"choices": [], "usage": usage, "timings": timings})
        events = b"".join(b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames)
        self._send(events + b"data: [DONE]\n\n")

    def _json(self, value: dict[str, object]) -> None:
        self._send(json.dumps(value).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...


def _prompt_of(body: dict[str, object]) -> list[str]:
    if "prompt" in body:
        return [str(token) for token in body["prompt"]]  # type: ignore[attr-defined]
    return [word for said in body["messages"] for word in said["content"].split()]  # type: ignore[attr-defined]


def main(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        print(VERSION, file=sys.stderr)
        return
    if "ngram-cache" in arguments:
        sys.exit("error: unknown speculative type ngram-cache")
    flags = dict(pairwise(arguments))
    Handler.folder = Path(flags.get("--slot-save-path", "."))
    Handler.drafts = "--spec-type" in flags
    ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
