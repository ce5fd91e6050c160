"""`/v1/responses` and `/v1/conversations` over HTTP: with the official client, and what is stored for whom."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from emberkeep.config.settings import Config
from emberkeep.errors import ContextExceeded, EngineError
from emberkeep.memory.memory import Memory
from emberkeep.types.events import Finished, FinishReason, ReasoningDelta, TextDelta, ToolCallDelta
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Message, ToolCall
from helpers.scripted_server import COMPLETED, HANG, Running, ScriptedBackend, running, says

MODEL = "default"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALLS = [ToolCallDelta(0, 0, "call_1", "get_weather", '{"city":"Oslo"}'), Finished(0, FinishReason.TOOL_CALLS)]
_names = itertools.count()


class Site:
    """A server whose memory is a real one, and clients of it."""

    def __init__(self, server: Running, memory: Memory) -> None:
        self.server, self.memory = server, memory
        self.http = httpx.Client(base_url=server.url, timeout=20)

    @property
    def backend(self) -> ScriptedBackend:
        return self.server.backend

    def client(self, user: str = "") -> openai.OpenAI:
        query = {"user_id": user} if user else None
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, default_query=query)

    def post(self, path: str = "", **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/responses{path}", json=body)

    @property
    def seen(self) -> list[tuple[str, str]]:
        """The messages of the last request."""
        return [(message.role, message.content) for message in self.backend.last.messages]


@pytest.fixture(scope="module")
def whole_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    memory = Memory(tmp_path_factory.mktemp("data") / "memory.sqlite", limit_bytes=1 << 26)
    with running(ScriptedBackend(), Config()) as server:
        yield Site(server, memory)
    memory.close()


@pytest.fixture
def site(whole_site: Site) -> Site:
    whole_site.backend.reset()
    whole_site.backend.memory = whole_site.memory
    return whole_site


@pytest.fixture
def client(site: Site) -> openai.OpenAI:
    return site.client(f"user{next(_names)}")


# ── answers ──


def test_an_answer_at_once(site: Site, client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Hello!", instructions="Be brief.", temperature=0.5)
    assert response.output_text == "Hello world"
    assert (response.status, response.model, response.error) == ("completed", "org/tiny", None)
    assert response.usage is not None and response.usage.input_tokens_details.cached_tokens == 8
    assert (response.temperature, response.instructions) == (0.5, "Be brief.")
    assert site.seen == [("system", "Be brief."), ("user", "Hello!")]


def test_an_answer_as_a_stream(site: Site, client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hello!") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds.count("response.output_text.delta") == 2
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Hello world"
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_a_schema_is_parsed_by_the_client(site: Site, client: openai.OpenAI) -> None:
    class Town(BaseModel):
        name: str

    site.backend.reset(*says('{"name":', ' "Oslo"}'))
    site.backend.memory = site.memory
    parsed = client.responses.parse(model=MODEL, input="A town?", text_format=Town)
    assert parsed.output_parsed == Town(name="Oslo")
    assert site.backend.last.format is not None and site.backend.last.format.param == "text.format"


def test_a_tool_is_called_and_its_result_told(site: Site, client: openai.OpenAI) -> None:
    site.backend.reset(*CALLS, COMPLETED)
    site.backend.memory = site.memory
    first = client.responses.create(model=MODEL, input="Rain?", tools=[WEATHER])
    [call] = first.output
    assert call.type == "function_call" and call.arguments == '{"city":"Oslo"}'
    site.backend.script = says("It rains.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(model=MODEL, input=[result], tools=[WEATHER], previous_response_id=first.id)
    assert second.output_text == "It rains."
    assert site.backend.last.messages[1:] == (
        Message("assistant", tool_calls=(ToolCall("call_1", "get_weather", '{"city":"Oslo"}'),)),
        Message("tool", "rain", tool_call_id="call_1"),
    )


def test_reasoning_comes_back_to_the_model_though_the_client_keeps_only_what_is_sealed(
    site: Site, client: openai.OpenAI
) -> None:
    site.backend.reset(ReasoningDelta(0, "Hm."), *says("Yes."))
    asked: Any = {"model": MODEL, "store": False, "include": ["reasoning.encrypted_content"]}
    first = client.responses.create(input="Sure?", **asked)
    items: Any = [item.to_dict() for item in first.output]
    del items[0]["content"]
    client.responses.create(input=[{"role": "user", "content": "Sure?"}, *items], **asked)
    assert site.backend.last.messages[1] == Message("assistant", "Yes.", "Hm.")


def test_tokens_are_counted_with_what_came_before(site: Site, client: openai.OpenAI) -> None:
    alone = client.responses.input_tokens.count(model=MODEL, input="Hello!")
    assert (alone.object, alone.input_tokens) == ("response.input_tokens", 6)
    first = client.responses.create(model=MODEL, input="Hello!")
    both = client.responses.input_tokens.count(model=MODEL, input="Bye!", previous_response_id=first.id)
    assert both.input_tokens == 6 + len("Hello world") + 4


# ── errors ──


def test_errors_have_openais_shape(site: Site) -> None:
    refused = site.post(input="x", tools=[{"type": "file_search", "vector_store_ids": []}])
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "tools[0]")
    assert "'file_search' runs at OpenAI only" in error["message"]
    assert site.post(model="gpt-9", input="x").json()["error"]["code"] == "model_not_found"


def test_an_error_before_the_answer_has_its_status(site: Site) -> None:
    site.backend.reset(ContextExceeded(9, 4))
    refused = site.post(input="x", stream=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_an_error_in_a_stream_is_an_event_to_the_client(site: Site, client: openai.OpenAI) -> None:
    site.backend.reset(TextDelta(0, "Hel"), EngineError("It broke."))
    *_, error, last = client.responses.create(model=MODEL, input="x", stream=True)
    assert error.type == "error" and error.message == "It broke."
    assert last.type == "response.failed" and last.response.error is not None


def test_an_error_in_a_stream_ends_with_a_failed_response(site: Site) -> None:
    site.backend.reset(TextDelta(0, "Hel"), EngineError("It broke."))
    lines = site.post(input="x", stream=True).text.splitlines()
    last = json.loads(lines[-2].removeprefix("data: "))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["output"][0]["content"][0]["text"] == "Hel"


# ── what is stored ──


def test_a_response_is_kept_until_it_is_deleted(site: Site, client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hello!", metadata={"a": "b"})
    found = client.responses.retrieve(made.id)
    assert found == made and found.metadata == {"a": "b"}
    client.responses.delete(made.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_a_response_that_is_not_stored_leaves_nothing(site: Site, client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hello!", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="And?", previous_response_id=made.id)


def test_a_chain_has_everything_but_the_instructions(site: Site, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="One", instructions="Be brief.")
    second = client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    assert site.seen == [("user", "One"), ("assistant", "Hello world"), ("user", "Two")]
    branch = client.responses.create(model=MODEL, input="Other", previous_response_id=first.id)
    client.responses.create(model=MODEL, input="Three", previous_response_id=second.id)
    assert [text for _, text in site.seen] == ["One", "Hello world", "Two", "Hello world", "Three"]
    assert second.previous_response_id == branch.previous_response_id == first.id


def test_turns_of_a_chain_are_one_conversation_to_the_backend(site: Site, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="One")
    second = client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    client.responses.create(model=MODEL, input="Three", previous_response_id=second.id)
    assert [request.conversation_id for request in site.backend.requests] == [first.id] * 3


def test_a_history_that_the_client_keeps_has_no_name(site: Site, client: openai.OpenAI) -> None:
    history: Any = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Yes"}]
    client.responses.create(model=MODEL, input=[*history, {"role": "user", "content": "Two"}])
    client.responses.create(model=MODEL, input="One", store=False)
    assert [request.conversation_id for request in site.backend.requests] == [None, None]


def test_a_chain_with_a_deleted_response_cannot_go_on(site: Site, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="One")
    second = client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        client.responses.create(model=MODEL, input="Three", previous_response_id=second.id)


def test_input_items_are_what_the_model_was_given(site: Site, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="One")
    second = client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    newest = client.responses.input_items.list(second.id)
    texts: list[Any] = [item.content[0].text for item in newest if item.type == "message"]  # type: ignore[union-attr]
    assert texts == ["Two", "Hello world", "One"]
    pages = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert len(pages.data) == 2 and pages.has_more
    assert [item.id for item in pages] == [item.id for item in newest][::-1]


def test_an_item_may_be_named_instead_of_sent(site: Site, client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="One")
    reference: Any = {"type": "item_reference", "id": made.output[0].id}
    client.responses.create(model=MODEL, input=[reference, {"role": "user", "content": "Two"}])
    assert site.seen == [("assistant", "Hello world"), ("user", "Two")]
    with pytest.raises(openai.BadRequestError, match="no such item is stored"):
        client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_none"}])


def test_nobody_sees_what_is_another_users(site: Site, client: openai.OpenAI) -> None:
    mine = client.responses.create(model=MODEL, input="One")
    conversation = client.conversations.create(items=[{"type": "message", "role": "user", "content": "One"}])
    [item] = client.conversations.items.list(conversation.id).data
    other = site.client("somebody-else")
    reference: Any = [{"type": "item_reference", "id": mine.output[0].id}, {"role": "user", "content": "x"}]
    for ask in (
        lambda: other.responses.retrieve(mine.id),
        lambda: other.responses.delete(mine.id),
        lambda: other.responses.cancel(mine.id),
        lambda: other.responses.input_items.list(mine.id),
        lambda: other.responses.create(model=MODEL, input="x", previous_response_id=mine.id),
        lambda: other.responses.create(model=MODEL, input="x", conversation=conversation.id),
        lambda: other.conversations.retrieve(conversation.id),
        lambda: other.conversations.update(conversation.id, metadata={}),
        lambda: other.conversations.delete(conversation.id),
        lambda: other.conversations.items.list(conversation.id),
        lambda: other.conversations.items.retrieve(item.id, conversation_id=conversation.id),
        lambda: other.conversations.items.delete(item.id, conversation_id=conversation.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    with pytest.raises(openai.BadRequestError):
        other.responses.create(model=MODEL, input=reference)
    assert client.responses.retrieve(mine.id) == mine


def test_the_body_may_name_the_user_and_must_not_name_another(site: Site) -> None:
    made = site.post(input="One", user="ada").json()
    assert site.backend.last.user == "ada"
    assert site.http.get(f"/v1/responses/{made['id']}").status_code == 404
    assert site.http.get(f"/v1/responses/{made['id']}", params={"user": "ada"}).json() == made
    clash = site.http.post("/v1/responses", json={"input": "One", "user": "ada"}, params={"user": "bob"})
    assert clash.status_code == 400


def test_forgetting_a_user_removes_responses_and_conversations(site: Site) -> None:
    client = site.client("leaving")
    made = client.responses.create(model=MODEL, input="One")
    conversation = client.conversations.create()
    client.responses.create(model=MODEL, input="Two", conversation=conversation.id)
    removed = site.memory.forget(private_namespace("leaving"))
    assert (removed.responses, removed.conversations) == (2, 1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_without_a_memory_there_are_answers_but_nothing_is_stored(site: Site) -> None:
    site.backend.memory = None
    made = site.post(input="One").json()
    assert (made["status"], made["store"]) == ("completed", False)
    for refused in (
        site.http.get(f"/v1/responses/{made['id']}"),
        site.post(input="Two", previous_response_id=made["id"]),
        site.post(input="Two", background=True),
        site.http.post("/v1/conversations", json={}),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "memory_off")


# ── conversations ──


def test_a_conversation_grows_by_its_responses(site: Site, client: openai.OpenAI) -> None:
    opening: Any = [{"type": "message", "role": "developer", "content": "Be brief."}]
    conversation = client.conversations.create(items=opening, metadata={"topic": "sky"})
    assert (conversation.object, conversation.metadata) == ("conversation", {"topic": "sky"})
    first = client.responses.create(model=MODEL, input="One", conversation=conversation.id)
    assert first.conversation is not None and first.conversation.id == conversation.id
    client.responses.create(model=MODEL, input="Two", conversation={"id": conversation.id})
    assert site.seen == [
        ("developer", "Be brief."),
        ("user", "One"),
        ("assistant", "Hello world"),
        ("user", "Two"),
    ]
    assert site.backend.last.conversation_id == conversation.id
    roles = [item.role for item in client.conversations.items.list(conversation.id, order="asc")]  # type: ignore[union-attr]
    assert roles == ["developer", "user", "assistant", "user", "assistant"]


def test_a_response_of_a_conversation_can_be_continued_by_itself(site: Site, client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    first = client.responses.create(model=MODEL, input="One", conversation=conversation.id)
    client.responses.create(model=MODEL, input="Two", conversation=conversation.id)
    client.responses.create(model=MODEL, input="Other", previous_response_id=first.id)
    assert [text for _, text in site.seen] == ["One", "Hello world", "Other"]


def test_a_response_that_is_not_stored_adds_nothing_to_its_conversation(site: Site, client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    client.responses.create(model=MODEL, input="One", conversation=conversation.id, store=False)
    assert client.conversations.items.list(conversation.id).data == []


def test_conversations_are_changed_and_deleted(site: Site, client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    changed = client.conversations.update(conversation.id, metadata={"topic": "sea"})
    assert client.conversations.retrieve(conversation.id) == changed
    assert changed.metadata == {"topic": "sea"} and changed.created_at == conversation.created_at
    made = client.responses.create(model=MODEL, input="One", conversation=conversation.id)
    deleted = client.conversations.delete(conversation.id)
    assert deleted.deleted and deleted.object == "conversation.deleted"
    for ask in (
        lambda: client.conversations.retrieve(conversation.id),
        lambda: client.responses.retrieve(made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()


def test_metadata_must_be_given_to_be_changed(site: Site) -> None:
    made = site.http.post("/v1/conversations", json={"metadata": {"topic": "sea"}}).json()
    refused = site.http.post(f"/v1/conversations/{made['id']}", json={})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")
    assert site.http.get(f"/v1/conversations/{made['id']}").json() == made


def test_items_of_a_conversation_are_added_read_and_deleted(site: Site, client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    given: Any = [{"type": "message", "role": "user", "content": text} for text in ("one", "two")]
    first, second = client.conversations.items.create(conversation.id, items=given).data
    assert first.id != second.id
    assert client.conversations.items.retrieve(first.id or "", conversation_id=conversation.id) == first
    left = client.conversations.items.delete(first.id or "", conversation_id=conversation.id)
    assert left.id == conversation.id
    assert client.conversations.items.list(conversation.id).data == [second]
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(first.id or "", conversation_id=conversation.id)


def test_what_a_conversation_has_is_not_said_again(site: Site, client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[{"type": "message", "role": "user", "content": "One"}])
    [first] = client.conversations.items.list(conversation.id).data
    again: Any = [{"type": "item_reference", "id": first.id}, first.to_dict(), {"role": "user", "content": "Two"}]
    made = client.responses.create(model=MODEL, input=again, conversation=conversation.id)
    assert site.seen == [("user", "One"), ("user", "Two")]
    pages = client.conversations.items.list(conversation.id, order="asc", limit=1)
    ids = [item.id for item in itertools.islice(pages, 10)]
    assert len(ids) == 3 == len(set(ids)) and ids[0] == first.id
    reference: Any = [{"type": "item_reference", "id": made.output[0].id}, {"role": "user", "content": "Three"}]
    client.responses.create(model=MODEL, input=reference, previous_response_id=made.id)
    assert [text for _, text in site.seen] == ["One", "Two", "Hello world", "Three"]


def test_another_item_with_an_id_that_is_taken_is_refused(site: Site) -> None:
    named = [{"id": "msg_1", "role": "user", "content": text} for text in ("One", "Two")]
    made = site.http.post("/v1/conversations", json={"items": named[:1]}).json()["id"]
    for refused, param in (
        (site.http.post(f"/v1/conversations/{made}/items", json={"items": named}), "items[1].id"),
        (site.http.post("/v1/conversations", json={"items": named}), "items[1].id"),
        (site.post(input=named, conversation=made), "input[1].id"),
    ):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert len(site.http.get(f"/v1/conversations/{made}/items").json()["data"]) == 1


def test_pages_end_though_items_share_an_id(site: Site) -> None:
    named = [{"id": f"msg_{number % 2}", "role": "user", "content": str(number)} for number in range(4)]
    made = site.post(input=named, user="ids").json()["id"]
    client = site.client("ids")
    found = list(itertools.islice(client.responses.input_items.list(made, limit=1), 10))
    assert [item.id for item in found] == ["msg_1", "msg_0"]


def test_one_cannot_go_on_after_an_item_that_is_not_there(site: Site, client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[{"type": "message", "role": "user", "content": "One"}])
    made = client.responses.create(model=MODEL, input="Two")
    with pytest.raises(openai.BadRequestError, match="no item here has this id"):
        client.conversations.items.list(conversation.id, after="msg_none")
    with pytest.raises(openai.BadRequestError, match="no item here has this id"):
        client.responses.input_items.list(made.id, after="msg_none")


def test_a_conversation_that_is_too_large_for_the_memory_is_refused(site: Site, tmp_path: Path) -> None:
    site.backend.memory = memory = Memory(tmp_path / "small.sqlite", limit_bytes=1_000_000)
    made = site.http.post("/v1/conversations", json={}).json()["id"]
    item = {"role": "user", "content": "x" * 400_000}
    assert site.http.post(f"/v1/conversations/{made}/items", json={"items": [item]}).status_code == 200
    for refused, param in (
        (site.http.post(f"/v1/conversations/{made}/items", json={"items": [item]}), "items"),
        (site.http.post("/v1/conversations", json={"items": [item, item]}), "items"),
        (site.post(input=[item], conversation=made), "conversation"),
    ):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert "larger memory_budget" in refused.json()["error"]["message"]
    assert site.post(input=[item], conversation=made, store=False).status_code == 200
    assert site.post(input="One", conversation=made).status_code == 200
    assert len(site.http.get(f"/v1/conversations/{made}/items").json()["data"]) == 3
    memory.close()


def test_references_are_no_items_of_a_conversation(site: Site) -> None:
    refused = site.http.post("/v1/conversations", json={"items": [{"type": "item_reference", "id": "x"}]})
    assert refused.status_code == 400


# ── in the background ──


def poll(client: openai.OpenAI, response_id: str) -> Any:
    for _ in range(1000):
        response = client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
    raise AssertionError("it never ended")


def test_a_response_in_the_background_is_fetched_later(site: Site, client: openai.OpenAI) -> None:
    started = client.responses.create(model=MODEL, input="One", background=True)
    assert (started.status, started.output) == ("queued", [])
    ended = poll(client, started.id)
    assert (ended.status, ended.output_text, ended.background) == ("completed", "Hello world", True)


def test_a_response_in_the_background_is_cancelled(site: Site, client: openai.OpenAI) -> None:
    site.backend.reset(TextDelta(0, "Hel"), HANG)
    site.backend.memory = site.memory
    started = client.responses.create(model=MODEL, input="One", background=True)
    assert site.backend.hanging.wait(10)
    assert client.responses.retrieve(started.id).status == "in_progress"
    cancelled = client.responses.cancel(started.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
    assert site.backend.stopped_early.wait(10)
    assert client.responses.cancel(started.id) == cancelled == client.responses.retrieve(started.id)


@pytest.fixture
def saving(site: Site, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when a response begins to be stored, which takes a while."""
    begun, save = threading.Event(), site.memory.responses.save

    def save_slowly(*given: Any, **named: Any) -> bool:
        begun.set()
        time.sleep(0.3)
        return save(*given, **named)

    monkeypatch.setattr(site.memory.responses, "save", save_slowly)
    return begun


def test_a_response_that_is_being_stored_is_found_by_who_cancels_it(
    site: Site, client: openai.OpenAI, saving: threading.Event
) -> None:
    started = client.responses.create(model=MODEL, input="One", background=True)
    assert saving.wait(10)
    assert client.responses.cancel(started.id).status == "completed"
    assert client.responses.retrieve(started.id).output_text == "Hello world"


def test_a_response_that_is_deleted_while_it_is_being_stored_stays_away(
    site: Site, client: openai.OpenAI, saving: threading.Event
) -> None:
    started = client.responses.create(model=MODEL, input="One", background=True)
    assert saving.wait(10)
    client.responses.delete(started.id)
    time.sleep(0.5)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(started.id)


def test_two_who_cancel_a_response_are_told_the_same(
    site: Site, client: openai.OpenAI, saving: threading.Event
) -> None:
    site.backend.reset(TextDelta(0, "Hel"), HANG)
    site.backend.memory = site.memory
    started = client.responses.create(model=MODEL, input="One", background=True)
    assert site.backend.hanging.wait(10)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(client.responses.cancel, started.id)
        assert saving.wait(10)
        assert client.responses.cancel(started.id) == first.result()
    assert first.result().status == "cancelled"


def test_a_response_in_the_background_that_fails_says_why(site: Site, client: openai.OpenAI) -> None:
    site.backend.reset(EngineError("It broke."))
    site.backend.memory = site.memory
    ended = poll(client, client.responses.create(model=MODEL, input="One", background=True).id)
    assert (ended.status, ended.error.message) == ("failed", "It broke.")


def test_only_what_runs_in_the_background_can_be_cancelled(site: Site, client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="One")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)


def test_a_stored_response_is_not_streamed_again(site: Site, client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="One")
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(made.id, stream=True)


def test_a_restart_keeps_responses(tmp_path: Path) -> None:
    path = tmp_path / "memory.sqlite"
    for _ in range(2):
        backend = ScriptedBackend()
        backend.memory = Memory(path, limit_bytes=1 << 26)
        with running(backend, Config()) as server, httpx.Client(base_url=server.url) as http:
            if not (known := list(backend.memory.export())[1:]):
                made = http.post("/v1/responses", json={"input": "One"}).json()
            assert http.get(f"/v1/responses/{made['id']}").json() == made
        backend.memory.close()
    assert len(known) == 1
