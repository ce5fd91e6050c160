"""The client reads what the server's own frames say."""

from __future__ import annotations

import asyncio
import json
from time import perf_counter

import pytest

from emberkeep.api.errors import failure_of
from emberkeep.api.openai_answer import ChatFrames
from emberkeep.backend.base import ModelCard
from emberkeep.bench.servers import BenchClient, TimedExchange, is_settled, parse_stream
from emberkeep.errors import EmberkeepError, EngineError
from emberkeep.server.routes.openai import new_envelope
from emberkeep.types.events import (
    Completed,
    Event,
    Finished,
    FinishReason,
    LookupRecord,
    Progress,
    TextDelta,
    Timings,
    Usage,
)

pytestmark = pytest.mark.slow

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
COMPLETED = Completed(
    Usage(prompt_tokens=100, completion_tokens=3, cached_tokens=99),
    Timings(predicted_ms=50.0, queue_ms=7.0),
    LookupRecord(prompt_tokens=100, warm_tokens=9, cold_tokens=90, load_ms=4.0),
)


def frames() -> ChatFrames:
    return ChatFrames(new_envelope("chatcmpl", ModelCard("m", 0, 128), None), include_usage=True)


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def streamed(*events: Event) -> TimedExchange:
    writer = frames()
    parts = [part for event in events if (part := writer.frame(event))]
    return TimedExchange(1.0, 1.5, 2.0, HEAD + chunked(*parts, writer.end()))


ANSWER = streamed(TextDelta(0, 'Say "'), TextDelta(0, "hé\n"), Finished(0, FinishReason.LENGTH), COMPLETED)


def test_a_streamed_answer_is_read_with_its_costs() -> None:
    reply = parse_stream(ANSWER)
    assert reply.text == 'Say "hé\n'
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (100, 3, 99)
    assert reply.timings["predicted_ms"] == 50.0
    assert reply.ttft_ms == 500


def test_the_tier_is_the_one_that_most_came_from() -> None:
    assert parse_stream(ANSWER).tier == "cold"


def test_the_stream_of_a_llama_server_is_read_like_ours() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    frames = [
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"delta": {"content": "Yes"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage, "timings": {"cache_n": 4, "predicted_ms": 30.0}},
    ]
    events = b"".join(b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames)
    reply = parse_stream(TimedExchange(0, 0.5, 1, b"HTTP/1.1 200 OK\r\n\r\n" + events + b"data: [DONE]\n\n"))
    assert (reply.text, reply.cached_tokens, reply.tier) == ("Yes", 4, "-")


def test_a_refused_request_is_an_error_with_the_servers_words() -> None:
    refused = TimedExchange(0, 0, 0, b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": {"message": "too long"}}')
    with pytest.raises(EmberkeepError, match="too long"):
        parse_stream(refused)


def test_a_stream_that_fails_in_the_middle_is_an_error() -> None:
    writer = frames()
    raw = HEAD + chunked(writer.frame(TextDelta(0, "a")), writer.failure(failure_of(EngineError("It broke.")), ""))
    with pytest.raises(EmberkeepError, match=r"It broke\."):
        parse_stream(TimedExchange(0, 0, 0, raw))


def stats(*, active: int = 0, pending: int = 0, inserted: int = 4, written: int = 4) -> dict[str, object]:
    cold = {"pending_chunks": pending, "written_chunks": written, "refused_chunks": 0}
    return {
        "scheduler": {"active": active, "waiting": 0},
        "store": {"inserted_chunks": inserted, "cold": cold},
    }


def test_a_server_is_settled_when_nothing_runs_and_everything_is_written() -> None:
    assert is_settled(stats())
    assert not is_settled(stats(active=1))
    assert not is_settled(stats(pending=1))
    assert not is_settled(stats(inserted=5))  # being written: no longer pending and not yet counted


async def exchange_of(*pieces: bytes) -> tuple[TimedExchange, list[float]]:
    """What the client makes of these, which are sent one after the other, and when each was sent."""
    sent: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            sent.append(perf_counter())
            writer.write(piece)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await BenchClient(port).post("/v1/chat/completions", {}), sent


def test_an_answer_that_arrives_in_pieces_is_kept_whole() -> None:
    got, _ = asyncio.run(exchange_of(ANSWER.raw[:40], ANSWER.raw[40:300], ANSWER.raw[300:]))
    assert got.raw == ANSWER.raw
    assert got.sent <= got.first <= got.ended


def test_the_clock_stops_at_text_and_not_at_progress_or_an_empty_end() -> None:
    writer = frames()
    progress = writer.frame(Progress(total=10, cached=0, processed=5, elapsed_ms=1.0))
    text = writer.frame(TextDelta(0, '"'))
    got, sent = asyncio.run(exchange_of(HEAD + progress, text))
    assert got.first > sent[1]
    got, _ = asyncio.run(exchange_of(HEAD + progress, frames().frame(Finished(0, FinishReason.STOP))))
    assert got.first == got.ended
