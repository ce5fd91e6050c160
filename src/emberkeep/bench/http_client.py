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
from time import perf_counter

from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json
from emberkeep.values import dataclass

Messages = Sequence[Mapping[str, str]]

_FIRST_TOKEN = re.compile(rb'"(?:content|text)": ?"[^"]')
"""An event that carries text; a role or a report of progress is none."""
STATS = "/v1/stats"
_POLL_S = 0.01
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
