from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from emberkeep.cluster.requests import (
    BLOCK_BYTES,
    Merge,
    ReplicaAnswer,
    ReplicaRequest,
    Route,
    conversation_key,
    forgotten_user,
    merge_for,
    merged,
    route_of,
)
from emberkeep.types.request import Json

LONG = "The tide comes in twice a day, and the ships wait for it. " * 60


def ask(path: str, body: Json, method: str = "POST", query: bytes = b"") -> Route:
    return route_of(ReplicaRequest(method, path, query, body=json.dumps(body).encode()))


def user(text: str) -> Json:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [user(LONG)]}),
        ("/chat/completions/", {"messages": [user(LONG)]}),
        ("/v1/completions", {"prompt": LONG}),
        ("/completion", {"prompt": LONG}),
        ("/infill", {"input_prefix": LONG}),
        ("/v1/responses", {"instructions": LONG, "input": "hello"}),
        ("/v1/messages", {"system": [{"type": "text", "text": LONG}], "messages": [user("hello")]}),
        ("/api/chat", {"messages": [user(LONG)]}),
        ("/api/generate", {"system": LONG, "prompt": "hello"}),
    ],
)
def test_every_door_is_routed_by_how_its_prompt_begins(path: str, body: Json) -> None:
    route = ask(path, body)
    assert route.is_answer
    assert len(route.keys.beginnings) == pytest.approx(len(LONG) // BLOCK_BYTES, abs=1)


def test_a_conversation_that_goes_on_begins_with_all_blocks_of_its_earlier_turn() -> None:
    first = [{"role": "system", "content": LONG}, user(LONG)]
    longer = [*first, {"role": "assistant", "content": LONG}, user("And then?")]
    before = ask("/v1/chat/completions", {"messages": first}).keys.beginnings
    after = ask("/v1/chat/completions", {"messages": longer, "temperature": 1}).keys.beginnings
    assert after[: len(before)] == before
    assert len(after) > len(before)


def test_a_changed_word_changes_the_block_that_it_is_in_and_all_after_it() -> None:
    at = 3 * BLOCK_BYTES + 10
    changed = f"{LONG[:at]}!{LONG[at + 1 :]}"
    one, other = (ask("/v1/completions", {"prompt": text}).keys.beginnings for text in (LONG, changed))
    assert one[:3] == other[:3]
    assert not set(one[3:]) & set(other)


def test_how_a_client_writes_a_message_makes_no_difference() -> None:
    plain = {"messages": [user(LONG), {"role": "assistant", "content": "Aye."}, user("And then?")]}
    in_blocks = {
        "messages": [
            {"content": [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}], "role": "user"},
            {"role": "assistant", "content": "Aye.", "tool_calls": None, "refusal": None},
            user("And then?"),
        ]
    }
    assert ask("/v1/messages", plain).keys == ask("/v1/messages", in_blocks).keys


def test_two_users_share_no_key() -> None:
    body = {"messages": [user(LONG)], "conversation_id": "boat"}
    routes = [ask("/v1/chat/completions", {**body, "user": name}) for name in ("ann", "bob", "")]
    routes.append(ask("/v1/chat/completions", {**body, "user": "ann", "cache_salt": "x"}))
    assert len({route.keys.conversation for route in routes}) == 4
    assert len({beginning for route in routes for beginning in route.keys.beginnings}) == 4 * len(
        routes[0].keys.beginnings
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"user_id": "ann"}),
        ("/v1/chat/completions", {"safety_identifier": "ann"}),
        ("/v1/chat/completions", {"llama_user_id": "ann"}),
        ("/v1/messages", {"metadata": {"user_id": "ann"}}),
        ("/v1/messages", {"metadata": {"user_id": "ann_session_1"}}),
    ],
)
def test_a_user_is_found_wherever_the_server_finds_one(path: str, body: Json) -> None:
    assert ask(path, {"messages": [user("hello")], **body}).user == "ann"


def test_a_user_is_found_in_the_query() -> None:
    assert ask("/v1/responses/resp_1", {}, "GET", b"user=ann").user == "ann"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"conversation_id": "boat"}),
        ("/v1/chat/completions", {"prompt_cache_key": "boat"}),
        ("/v1/responses", {"conversation": "boat"}),
        ("/v1/responses", {"conversation": {"id": "boat"}}),
        ("/v1/responses", {"previous_response_id": "boat"}),
        ("/v1/responses/boat", {}),
        ("/v1/responses/boat/cancel", {}),
        ("/v1/conversations/boat", {}),
        ("/v1/messages", {"metadata": {"user_id": "_session_boat"}, "user": ""}),
    ],
)
def test_a_conversation_is_found_wherever_it_is_named(path: str, body: Json) -> None:
    route = ask(path, body)
    assert route.keys.conversation == conversation_key(route.owner, "boat")


def test_a_conversation_with_a_long_name_is_remembered_as_briefly_as_any() -> None:
    keys = {ask("/v1/responses", {"conversation": "boat" * size}).keys.conversation for size in (1, 2, 100_000)}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"text"', b'{"messages": 3, "user": 5, "tools": "x"}', b"\xff"]
)
def test_what_is_no_good_is_routed_all_the_same(body: bytes) -> None:
    route = route_of(ReplicaRequest("POST", "/v1/chat/completions", body=body))
    assert route.is_answer
    assert not route.user


def test_reading_is_no_answer_of_a_model() -> None:
    assert not ask("/v1/models", {}, "GET").is_answer
    assert not ask("/v1/responses/resp_1/cancel", {}).is_answer
    assert not ask("/v1/cache/explain", {"messages": [user("hello")]}).is_answer


def test_of_a_very_long_prompt_the_beginning_counts() -> None:
    assert len(ask("/v1/completions", {"prompt": "x" * (4 << 20)}).keys.beginnings) == 2048


def test_who_is_to_be_forgotten_is_read_from_the_address() -> None:
    assert forgotten_user(ReplicaRequest("DELETE", "/v1/cache", b"user_id=ann%20b")) == "ann b"
    assert forgotten_user(ReplicaRequest("DELETE", "/v1/cache/", b"user_id=")) == ""
    assert forgotten_user(ReplicaRequest("DELETE", "/v1/cache/abc", b"user_id=ann")) is None
    assert forgotten_user(ReplicaRequest("GET", "/v1/cache", b"user_id=ann")) is None


def test_a_mark_does_not_change_where_a_request_goes() -> None:
    said = "The tides of this coast. " * 40
    marked = {"role": "user", "content": said, "stable": True, "cache_control": {"type": "ephemeral"}}
    keys = [ask("/v1/chat/completions", {"messages": [one]}).keys for one in (marked, user(said))]
    assert keys[0] == keys[1]


def answer_of(replica: str, value: Json, status: int = 200) -> ReplicaAnswer:
    return ReplicaAnswer(replica, status, (), json.dumps(value).encode())


def merge(how: Merge, *answers: ReplicaAnswer) -> tuple[int, Json]:
    one = merged(how, answers)
    return one.status, json.loads(one.body)


@pytest.mark.parametrize(
    ("method", "path", "how"),
    [
        ("GET", "/health", Merge.HEALTH),
        ("HEAD", "/v1/health/", Merge.HEALTH),
        ("GET", "/v1/stats", Merge.EACH),
        ("GET", "/metrics", Merge.METRICS),
        ("GET", "/v1/cache", Merge.LISTS),
        ("GET", "/v1/cache/abc", Merge.ANY),
        ("DELETE", "/v1/cache", Merge.SUM),
        ("DELETE", "/v1/cache/abc", Merge.SUM),
        ("DELETE", "/v1/memory", Merge.SUM),
        ("POST", "/models/load", Merge.ANY),
        ("POST", "/v1/cache/explain", None),
        ("GET", "/v1/responses/resp_1", Merge.ANY),
        ("POST", "/responses/resp_1/cancel", Merge.ANY),
        ("POST", "/v1/responses/input_tokens", None),
        ("GET", "/v1/models", None),
        ("POST", "/v1/chat/completions", None),
    ],
)
def test_what_every_replica_is_asked(method: str, path: str, how: Merge | None) -> None:
    assert merge_for(method, path) is how


@pytest.mark.parametrize(
    ("replicas", "status", "word"),
    [(("ok", "ok"), 200, "ok"), (("ok", "failed"), 200, "degraded"), (("draining", "failed"), 503, "failed")],
)
def test_a_cluster_is_well_while_one_replica_is(replicas: tuple[str, ...], status: int, word: str) -> None:
    answers = [answer_of(str(n), {"status": one}, 200 if one == "ok" else 503) for n, one in enumerate(replicas)]
    got, health = merge(Merge.HEALTH, *answers)
    assert (got, health["status"]) == (status, word)
    assert set(health["replicas"]) == {"0", "1"}


def test_lists_become_one_whose_entries_say_where_they_are() -> None:
    pages = [
        answer_of(n, {"data": [{"id": n * 3}], "has_more": n == "b", "totals": {"bytes": 5, "tokens": 1}})
        for n in "ab"
    ]
    _, listed = merge(Merge.LISTS, *pages)
    assert listed["data"] == [{"id": "aaa", "replica": "a"}, {"id": "bbb", "replica": "b"}]
    assert listed["has_more"]
    assert listed["totals"] == {"bytes": 10, "tokens": 2}


def test_one_that_has_it_is_enough_and_a_real_failure_says_more_than_an_absence() -> None:
    absent, there, broken = answer_of("0", {}, 404), answer_of("1", {"id": 1}), answer_of("2", {"error": 1}, 500)
    assert merge(Merge.ANY, absent, there, broken) == (200, {"id": 1})
    assert merge(Merge.SUM, absent, there) == (200, {"id": 1})
    assert merge(Merge.ANY, absent, broken) == (500, {"error": 1})
    assert merge(Merge.SUM, absent, absent)[0] == 404
    assert merge(Merge.SUM, absent, there, broken)[0] == 500
    assert merge(Merge.SUM, there, answer_of("2", {"error": 1}, 429))[0] == 429


def test_metrics_have_the_label_of_their_replica_and_one_head_for_each_name() -> None:
    text = '# HELP a_total Some.\n# TYPE a_total counter\na_total{x="1"} 4\n'
    one = merged(Merge.METRICS, [ReplicaAnswer(n, 200, (), text.encode()) for n in ("0", "1")]).body.decode()
    assert one.count("# TYPE a_total") == 1
    (family,) = text_string_to_metric_families(one)
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"replica": "0", "x": "1"}, 4.0),
        ({"replica": "1", "x": "1"}, 4.0),
    ]
