from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from emberkeep.cluster.gateway import Gateway, ReplicaLost
from emberkeep.cluster.requests import AnswerPart, Message, ReplicaAnswer, ReplicaRequest, conversation_key
from emberkeep.errors import Overloaded, RateLimited
from emberkeep.routing import RouteKeys
from emberkeep.types.request import Json

T = TypeVar("T")

HEAD: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"x-request-id", b"theirs")],
}
LOST = "lost"
TAKEN = "taken"
"""A replica has it, and has nothing to say yet."""
HANGS = "hangs"


def body(text: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


@dataclass(slots=True)
class FakeAnswer:
    replica: str
    script: Sequence[Message | str]
    is_cancelled: bool = False

    async def __aiter__(self) -> AsyncIterator[AnswerPart]:
        for step in self.script:
            if step == LOST:
                raise ReplicaLost
            if step == HANGS:
                await asyncio.Event().wait()
            if step == TAKEN:
                yield AnswerPart(self.replica, [])
                continue
            assert not isinstance(step, str)
            yield AnswerPart(self.replica, [step])

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass(slots=True)
class FakeReplicas:
    """Each request gets the next script; replicas are numbered as they are asked."""

    scripts: list[Sequence[Message | str]]
    asked: list[FakeAnswer] = field(default_factory=list)
    learnt: list[tuple[RouteKeys, str]] = field(default_factory=list)
    forgotten: list[tuple[str, frozenset[str]]] = field(default_factory=list)

    def ask(self, asked: ReplicaRequest, keys: RouteKeys) -> FakeAnswer:
        number = len(self.asked)
        self.asked.append(FakeAnswer(str(number), self.scripts[number]))
        return self.asked[-1]

    async def ask_all(self, asked: ReplicaRequest) -> Sequence[ReplicaAnswer]:
        told = [{"object": "cache.removed", "removed": {"entries": n, "tokens": 10 * n}} for n in (1, 2)]
        return [ReplicaAnswer(str(n), 200, (), json.dumps(one).encode()) for n, one in enumerate(told)]

    async def forget_rest(self, user: str, asked: frozenset[str]) -> None:
        self.forgotten.append((user, asked))

    def learn(self, keys: RouteKeys, replica: str) -> None:
        self.learnt.append((keys, replica))


@dataclass(slots=True)
class Client:
    gateway: Gateway
    path: str = "/v1/chat/completions"
    method: str = "POST"
    said: Json = None
    query: bytes = b""
    got: list[Message] = field(default_factory=list)
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    has_asked: bool = False

    async def ask(self) -> None:
        scope = {"type": "http", "method": self.method, "path": self.path, "query_string": self.query}
        scope["headers"] = []
        await self.gateway(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self.has_asked:
            self.has_asked = True
            return {"type": "http.request", "body": json.dumps(self.said or {}).encode(), "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.got.append(message)

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)


def gateway_of(replicas: FakeReplicas, per_user: int | None = None, drain_s: float = 0.0) -> Gateway:
    return Gateway(replicas, per_user, drain_s, lambda: b"")


def run(scenario: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(20):
            return await scenario()

    return asyncio.run(bounded())


def begun(replicas: FakeReplicas) -> tuple[Gateway, Client, asyncio.Task[None]]:
    """A client that is asking."""
    gateway = gateway_of(replicas)
    client = Client(gateway)
    return gateway, client, asyncio.create_task(client.ask())


async def until(is_so: Callable[[], object]) -> None:
    while not is_so():
        await asyncio.sleep(0)


WHOLE = (HEAD, body(b"data: 1\n\n"), body(b"data: [DONE]\n\n", more=False))


def ask(
    replicas: FakeReplicas, path: str = "/v1/chat/completions", method: str = "POST", said: Json = None
) -> Client:
    async def scenario() -> Client:
        client = Client(gateway_of(replicas), path, method, said)
        await client.ask()
        return client

    return run(scenario)


def test_an_answer_is_passed_on_as_it_comes() -> None:
    client = ask(FakeReplicas([WHOLE]))
    assert [message["type"] for message in client.got] == ["http.response.start", *["http.response.body"] * 2]
    assert client.got[0]["headers"] == [(b"content-type", b"text/event-stream")]  # the id is the gateway's
    assert client.got[1:] == list(WHOLE[1:])


@pytest.mark.parametrize("before", [(LOST,), (HEAD, LOST)])
def test_what_is_lost_before_any_of_it_was_sent_is_asked_again(before: Sequence[Message | str]) -> None:
    replicas = FakeReplicas([before, WHOLE])
    client = ask(replicas)
    assert len(replicas.asked) == 2
    assert [message["type"] for message in client.got].count("http.response.start") == 1
    assert client.text.endswith(b"data: [DONE]\n\n")


def test_a_stream_that_had_begun_ends_with_an_error_and_is_not_asked_again() -> None:
    replicas = FakeReplicas([(HEAD, body(b"data: 1\n\n"), LOST), WHOLE])
    client = ask(replicas)
    assert len(replicas.asked) == 1
    assert b"ask again" in client.text
    assert b"[DONE]" not in client.text
    assert not client.got[-1]["more_body"]


def test_an_answer_in_one_piece_that_had_begun_breaks_its_connection() -> None:
    head = {**HEAD, "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(ConnectionAbortedError):
        ask(FakeReplicas([(head, body(b'{"id"'), LOST)]))


def test_what_may_have_been_done_is_not_done_twice() -> None:
    replicas = FakeReplicas([(LOST,), WHOLE])
    with pytest.raises(Overloaded):
        ask(replicas, "/v1/conversations/boat/items")
    assert len(replicas.asked) == 1


def test_replicas_that_are_lost_one_after_the_other_are_not_asked_for_ever() -> None:
    replicas = FakeReplicas([(LOST,)] * 20)
    with pytest.raises(Overloaded):
        ask(replicas)
    assert len(replicas.asked) < 10


def test_the_replica_is_told_that_the_client_has_left() -> None:
    async def scenario() -> FakeReplicas:
        replicas = FakeReplicas([(HEAD, body(b"data: 1\n\n"), HANGS)])
        _, client, asking = begun(replicas)
        await until(lambda: len(client.got) == 2)
        client.leaves.set()
        await asking
        return replicas

    assert run(scenario).asked[0].is_cancelled


def test_a_replica_that_ends_gets_its_time_and_then_its_answers_are_broken_off() -> None:
    async def scenario() -> tuple[Client, FakeReplicas]:
        replicas = FakeReplicas([(HEAD, body(b"data: 1\n\n"), HANGS)])
        gateway, client, asking = begun(replicas)
        await until(lambda: len(client.got) == 2)
        gateway.set_present(frozenset({"0", "1"}))
        await asyncio.wait([asking], timeout=0.05)
        assert not asking.done()
        gateway.set_present(frozenset({"1"}))
        await asking
        return client, replicas

    client, replicas = run(scenario)
    assert b"stopped before this answer was complete" in client.text
    assert replicas.asked[0].is_cancelled


def test_a_replica_that_ends_before_it_has_answered_gives_its_request_away() -> None:
    async def scenario() -> tuple[Client, FakeReplicas]:
        replicas = FakeReplicas([(TAKEN, HANGS), WHOLE])
        gateway, client, asking = begun(replicas)
        while not asking.done():
            await asyncio.sleep(0.01)
            gateway.set_present(frozenset({"1"}))
        await asking
        return client, replicas

    client, replicas = run(scenario)
    assert replicas.asked[0].is_cancelled
    assert client.text.endswith(b"data: [DONE]\n\n")


def test_a_request_that_no_replica_has_yet_keeps_waiting_when_one_ends() -> None:
    async def scenario() -> FakeReplicas:
        replicas = FakeReplicas([(HANGS,), WHOLE])
        gateway, client, asking = begun(replicas)
        await until(lambda: replicas.asked)
        gateway.set_present(frozenset({"1"}))
        await asyncio.wait([asking], timeout=0.05)
        client.leaves.set()
        await asking
        return replicas

    assert len(run(scenario).asked) == 1


def test_an_answer_is_not_broken_off_for_the_end_of_a_replica_that_had_it_before() -> None:
    async def scenario() -> Client:
        replicas = FakeReplicas([(TAKEN, LOST), (TAKEN, HANGS)])
        gateway, client, asking = begun(replicas)
        await until(lambda: len(replicas.asked) == 2)
        gateway.set_present(frozenset({"1"}))
        await asyncio.wait([asking], timeout=0.05)
        assert not asking.done()
        client.leaves.set()
        await asking
        return client

    assert not run(scenario).got


def test_a_refusal_of_what_is_asked_again_is_not_taken_for_the_answer_that_had_begun() -> None:
    refusal = {"type": "http.response.start", "status": 503, "headers": [(b"content-type", b"application/json")]}
    replicas = FakeReplicas([(HEAD, LOST), (refusal, body(b'{"error": 1}', more=False))])
    client = ask(replicas)
    assert client.got[0]["status"] == 200
    assert client.text.startswith(b"data: ")
    assert b"ask again" in client.text
    assert replicas.asked[1].is_cancelled


def test_a_user_has_so_many_requests_and_others_have_their_own() -> None:
    async def scenario() -> None:
        replicas = FakeReplicas([(HEAD, HANGS), (HEAD, HANGS), WHOLE, WHOLE])
        gateway = gateway_of(replicas, per_user=2)
        first = [Client(gateway, said={"user": "ann"}) for _ in range(2)]
        asking = [asyncio.create_task(client.ask()) for client in first]
        await until(lambda: all(client.got for client in first))
        with pytest.raises(RateLimited):
            await Client(gateway, said={"user": "ann"}).ask()
        await Client(gateway, said={"user": "bob"}).ask()
        first[0].leaves.set()
        await asking[0]
        await Client(gateway, said={"user": "ann"}).ask()
        first[1].leaves.set()
        await asking[1]

    run(scenario)


def test_a_response_is_known_by_the_id_that_its_replica_gave_it() -> None:
    replicas = FakeReplicas([(HEAD, body(b'data: {"response":{"id":"resp_7"}}\n\n', more=False))])
    ask(replicas, "/v1/responses", said={"user": "ann"})
    assert replicas.learnt == [(RouteKeys(conversation_key('["ann", ""]', "resp_7")), "0")]


def test_what_all_replicas_do_is_added_up() -> None:
    client = ask(FakeReplicas([]), "/v1/cache", "DELETE")
    assert json.loads(client.text)["removed"] == {"entries": 3, "tokens": 30}


def test_who_is_forgotten_is_forgotten_where_no_replica_was_asked_too() -> None:
    replicas = FakeReplicas([])
    run(Client(gateway_of(replicas), "/v1/cache", "DELETE", query=b"user_id=ann").ask)
    assert replicas.forgotten == [("ann", frozenset({"0", "1"}))]
