"""The client reads what the server's own frames say."""

from __future__ import annotations

import asyncio
import json

import pytest

from emberkeep.api.chunks import ChatFrames
from emberkeep.api.errors import failure_of
from emberkeep.backend.base import ModelCard
from emberkeep.bench.http_client import Client, Exchange, completion_tokens, has_text, is_settled, parse_stream
from emberkeep.errors import EmberkeepError, EngineError
from emberkeep.server.openai import new_envelope
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


def streamed(*events: Event) -> Exchange:
    writer = frames()
    parts = [part for event in events if (part := writer.frame(event))]
    return Exchange(1.0, 1.5, 2.0, HEAD + chunked(*parts, writer.end()))


ANSWER = streamed(TextDelta(0, 'Say "'), TextDelta(0, "hé\n"), Finished(0, FinishReason.LENGTH), COMPLETED)


def test_a_streamed_answer_is_read_with_its_costs() -> None:
    reply = parse_stream(ANSWER)
    assert reply.text == 'Say "hé\n'
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (100, 3, 99)
    assert (reply.prepare_ms, reply.load_ms) == (7.0, 4.0)
    assert reply.ttft_ms == 500


def test_a_decode_step_is_the_time_between_two_tokens() -> None:
    assert parse_stream(ANSWER).decode_step_ms == 25.0


def test_drafts_are_read_in_the_words_of_either_server() -> None:
    assert (parse_stream(ANSWER).drafted_tokens, parse_stream(ANSWER).accepted_tokens) == (0, 0)
    openai = {
        "usage": {"completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}}
    }
    assert drafts_of(openai) == drafts_of({"timings": {"draft_n": 4, "draft_n_accepted": 3}}) == (4, 3)


def drafts_of(told: dict[str, dict[str, object]]) -> tuple[int, int]:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}}
    last = {"choices": [], "usage": usage | told.get("usage", {})}
    last["timings"] = {"predicted_ms": 3.0} | told.get("timings", {})
    reply = parse_stream(Exchange(0, 0, 0, b"HTTP/1.1 200 OK\r\n\r\ndata: " + json.dumps(last).encode()))
    return reply.drafted_tokens, reply.accepted_tokens


def test_the_tier_is_the_one_that_most_came_from() -> None:
    assert parse_stream(ANSWER).tier == "cold"


def test_the_tokens_of_an_answer_are_counted_with_and_without_streaming() -> None:
    body = b'{"usage": {"completion_tokens": 5}}'
    plain = Exchange(0, 0, 0, b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    assert completion_tokens(ANSWER, stream=True) == 3
    assert completion_tokens(plain, stream=False) == 5


def test_the_clock_stops_at_text_and_not_at_progress_or_an_empty_end() -> None:
    writer = frames()
    assert not has_text(HEAD + writer.frame(Progress(total=10, cached=0, processed=5, elapsed_ms=1.0)))
    assert not has_text(frames().frame(Finished(0, FinishReason.STOP)))
    assert has_text(frames().frame(TextDelta(0, '"')))
    later = frames()
    later.frame(TextDelta(0, "first"))
    assert has_text(later.frame(TextDelta(0, " second")))


def test_a_refused_request_is_an_error_with_the_servers_words() -> None:
    refused = Exchange(0, 0, 0, b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": {"message": "too long"}}')
    with pytest.raises(EmberkeepError, match="too long"):
        parse_stream(refused)


def test_a_stream_that_fails_in_the_middle_is_an_error() -> None:
    writer = frames()
    raw = HEAD + chunked(writer.frame(TextDelta(0, "a")), writer.failure(failure_of(EngineError("It broke.")), ""))
    with pytest.raises(EmberkeepError, match=r"It broke\."):
        parse_stream(Exchange(0, 0, 0, raw))


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


def test_an_answer_that_arrives_in_pieces_is_kept_whole() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in (ANSWER.raw[:40], ANSWER.raw[40:300], ANSWER.raw[300:]):
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def exchange() -> Exchange:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await Client(server.sockets[0].getsockname()[1]).post("/v1/chat/completions", {})

    got = asyncio.run(exchange())
    assert got.raw == ANSWER.raw
    assert got.sent <= got.first <= got.ended
