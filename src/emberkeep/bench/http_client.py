"""A small HTTP client for the loopback: it shares the cores with what it measures, so it does little.

While an answer arrives it only collects bytes and stamps the time, and after the first token it sleeps until
much has come; everything is parsed afterwards.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from time import perf_counter

from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json
from emberkeep.values import dataclass

Messages = Sequence[Mapping[str, str]]

_FIRST_TOKEN = re.compile(rb'"(?:content|text)": ?"[^"]')
_TEXT_KEYS = ("content", "text")
_POLL_S = 0.01
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and everything that came back. Times are on the performance counter, in seconds."""

    sent: float
    first: float
    """When the first byte of the first event with text was here; the end, if there was none."""
    ended: float
    raw: bytes

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.first - self.sent)

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
    """What a generation said and cost."""

    ttft_ms: float
    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tier: str
    """Where most of what was reused came from: `hot`, `warm`, `cold` or `-`."""
    prepare_ms: float
    """Template, tokens, queue: until loading began, by the server's own clock."""
    load_ms: float
    decode_step_ms: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Of the drafted ones: they cost no step of their own."""
    detail: Mapping[str, Json] = field(default_factory=dict)
    """What the server tells about it: the `emberkeep` object, which other servers do not send."""


class Client:
    """Every request opens a connection before its clock starts. Raises EmberkeepError for failed requests."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def chat(self, messages: Messages, max_tokens: int) -> Reply:
        return parse_stream(await self.post("/v1/chat/completions", chat_body(messages, max_tokens)))

    async def stats(self) -> dict[str, Json]:
        return dict(await self.get("/v1/stats"))

    async def prompt_tokens(self, messages: Messages) -> list[int]:
        """The token ids that a fresh conversation with these messages is evaluated as."""
        prompt = json.loads((await self.post("/apply-template", {"messages": messages})).body())["prompt"]
        return await self.tokenize(prompt)

    async def tokenize(self, text: str) -> list[int]:
        return list(json.loads((await self.post("/tokenize", {"content": text})).body())["tokens"])

    async def wait_until_settled(self) -> dict[str, Json]:
        """Wait until nothing runs and everything computed is on disk; the stats at that moment."""
        while not is_settled(stats := await self.stats()):
            await asyncio.sleep(_POLL_S)
        return stats

    async def get(self, path: str) -> Json:
        return json.loads((await self._exchange("GET", path, b"")).body())

    async def post(self, path: str, body: Json) -> Exchange:
        return await self._exchange("POST", path, json.dumps(body).encode())

    async def _exchange(self, method: str, path: str, body: bytes) -> Exchange:
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
    return {"messages": messages, **greedy(max_tokens, stream=True)}


def completion_body(prompt: Sequence[int], max_tokens: int, *, stream: bool) -> dict[str, Json]:
    return {"prompt": list(prompt), **greedy(max_tokens, stream=stream)}


def greedy(max_tokens: int, *, stream: bool) -> dict[str, Json]:
    extra = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return {"max_tokens": max_tokens, "temperature": 0, **extra}


def parse_stream(exchange: Exchange) -> Reply:
    """Of our server or of a llama-server. Raises EmberkeepError when the stream ended with an error."""
    frames = list(_frames(exchange.body()))
    failed = [frame["error"]["message"] for frame in frames if "error" in frame]
    if failed:
        raise EmberkeepError(f"The server under test failed in the middle of an answer: {failed[0]}")
    if not frames:
        raise EmberkeepError(f"The server under test answered without a frame: {exchange.body()[:200]!r}")
    timings, usage = frames[-1]["timings"], frames[-1]["usage"]
    detail: Json = next(
        (frame["emberkeep"] for frame in frames if "timings" in frame and "emberkeep" in frame), {}
    )
    return Reply(
        ttft_ms=exchange.ttft_ms,
        text="".join(_text(frame) for frame in frames),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        tier=_tier(detail.get("reused", {})),
        prepare_ms=detail.get("queue_ms", 0.0),
        load_ms=detail.get("load_ms", 0.0),
        decode_step_ms=timings["predicted_ms"] / max(usage["completion_tokens"] - 1, 1),
        **_drafts(timings, usage.get("completion_tokens_details") or {}),
        detail=detail,
    )


def _drafts(timings: Mapping[str, Json], details: Mapping[str, Json]) -> dict[str, int]:
    """By llama-server's words, or else by OpenAI's. A server that does not speculate says neither."""
    accepted = details.get("accepted_prediction_tokens", 0)
    told = accepted + details.get("rejected_prediction_tokens", 0)
    return {
        "drafted_tokens": timings.get("draft_n", told),
        "accepted_tokens": timings.get("draft_n_accepted", accepted),
    }


def completion_tokens(exchange: Exchange, *, stream: bool) -> int:
    """How many tokens a streamed or a plain answer has."""
    last = list(_frames(exchange.body()))[-1] if stream else json.loads(exchange.body())
    return int(last["usage"]["completion_tokens"])


def is_settled(stats: Mapping[str, Json]) -> bool:
    """Nothing runs, and every chunk inserted so far has been written or refused."""
    scheduler, store = stats["scheduler"], stats["store"]
    at_work = scheduler["active"] + scheduler["waiting"] + store["cold"]["pending_chunks"]
    through = store["cold"]["written_chunks"] + store["cold"]["refused_chunks"]
    return bool(at_work == 0 and through >= store["inserted_chunks"])


def has_text(raw: bytes | bytearray) -> bool:
    """Whether an event that carries text is among what has arrived; a role or a progress report is none."""
    return _FIRST_TOKEN.search(raw) is not None


async def _read(reader: asyncio.StreamReader, connection: socket.socket, sent: float) -> Exchange:
    raw, first = bytearray(), 0.0
    while data := await reader.read(_READ_BYTES):
        now = perf_counter()
        raw += data
        if not first and has_text(raw):
            first = now
            # Woken for every token, a client would take the server's cores from it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _READ_BYTES // 2)
    ended = perf_counter()
    return Exchange(sent, first or ended, ended, bytes(raw))


def _chunks(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        yield body[:length]
        body = body[length + 2 :]


def _frames(body: bytes) -> Iterator[dict[str, Json]]:
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def _text(frame: Mapping[str, Json]) -> str:
    """Of a chat or of a completion."""
    return "".join(
        choice.get("delta", choice).get(key) or "" for choice in frame.get("choices", ()) for key in _TEXT_KEYS
    )


def _tier(reused: Mapping[str, int]) -> str:
    most = max(reused, key=lambda tier: reused[tier], default="-")
    return most if reused.get(most) else "-"
