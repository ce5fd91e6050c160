"""Answers that fill the context while they are written."""

from __future__ import annotations

import pytest

from emberkeep.engine.base import KvUnit
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import MemoryFailed
from emberkeep.types.events import FinishReason, TextDelta
from helpers.conversing import CONTEXT, ENDLESS, Client, Harbour, line


def halfway(harbour: Harbour, **fields: object) -> Client:
    """A conversation with room for some hundred tokens, whose next answer does not end by itself."""
    client = Client(harbour, **{"sampling": ENDLESS, **fields})
    for number in range(6):
        client.say(line(number))
    return client


def test_an_answer_goes_on_when_the_context_is_full(harbour):
    client = halfway(harbour)
    answer = client.say("Tell me everything.", max_tokens=300)
    assert answer.reason is FinishReason.LENGTH
    assert answer.completed.usage.completion_tokens == len(answer.ids) == 300
    assert answer.completed.usage.prompt_tokens + 300 > CONTEXT
    assert answer.completed.usage.prompt_tokens == harbour.count_tokens(answer.prompt)
    assert len(answer.evictions) >= 1
    assert all(eviction.archived for eviction in answer.evictions)
    assert answer.evictions[-1].out == len(harbour.archived_texts())
    assert answer.lookup.is_approximate
    assert harbour.backend.scheduler.counters.cuts == len(answer.evictions)


def test_the_next_turn_goes_on_from_there(harbour):
    client = halfway(harbour)
    answer = client.say("Tell me everything.", max_tokens=300)
    again = client.say("More.")
    assert not again.evictions
    assert f"[{answer.evictions[-1].out} earlier messages" in again.prompt
    assert answer.text in again.prompt
    assert again.lookup.reused_tokens > again.completed.usage.prompt_tokens - 40


def test_an_answer_without_a_limit_ends_when_nothing_else_may_leave(harbour):
    client = halfway(harbour)
    answer = client.say("Tell me everything.", max_tokens=None)
    assert answer.reason is FinishReason.LENGTH
    assert answer.evictions[-1].out == 12
    assert len(answer.ids) > CONTEXT - 250
    assert harbour.archived_texts() == [message.content for message in client.messages[:12]]


def test_in_exact_mode_what_stays_is_evaluated_again(harbour):
    client = halfway(harbour, approximate=False)
    answer = client.say("Tell me everything.", max_tokens=300)
    assert answer.evictions
    assert not answer.lookup.is_approximate
    again = client.say("More.")
    assert again.ids == harbour.fresh(again, sampling=ENDLESS)


@pytest.mark.parametrize("unit", [KvUnit.SNAPSHOT, KvUnit.BOTH])
def test_an_engine_that_cannot_splice_evaluates_again(tmp_path, unit):
    engine = FakeEngine(context=CONTEXT, cells=4 * CONTEXT, kv_unit=unit)
    with Harbour(tmp_path, engine, recall="off") as harbour:
        client = halfway(harbour)
        answer = client.say("Tell me everything.", max_tokens=300)
        assert len(answer.ids) == 300
        assert answer.evictions
        assert not answer.lookup.is_approximate
        again = client.say("More.")
        assert again.ids == harbour.fresh(again, sampling=ENDLESS)


def test_several_answers_at_once_end_where_the_context_ends(harbour):
    client = halfway(harbour)
    answer = harbour.ask(client.request(n=2, max_tokens=300))
    assert not answer.evictions
    texts = [
        [event for event in answer.events if isinstance(event, TextDelta) and event.index == i] for i in (0, 1)
    ]
    assert all(texts)
    assert answer.completed.usage.completion_tokens < 600
    assert harbour.archived() == []


def test_where_nothing_may_leave_the_answer_ends_where_the_context_ends(harbour):
    client = halfway(harbour)
    answer = client.say("Tell me everything.", max_tokens=300, evict=False)
    assert answer.reason is FinishReason.LENGTH
    assert not answer.evictions
    assert answer.completed.usage.prompt_tokens + len(answer.ids) <= CONTEXT


def test_a_client_that_leaves_meanwhile_leaves_nothing_wrong_behind(harbour):
    client = halfway(harbour)
    client.say("Tell me everything.", max_tokens=300)
    asked = client.messages[:-1]
    client.messages = asked
    for after in (1, 200, 280):
        harbour.leave_in_the_middle(client.request(max_tokens=300), after)
    assert len({turn["key"] for turn in harbour.archived()}) == len(harbour.archived())
    answer = client.go_on(approximate=False)
    assert answer.ids == harbour.fresh(answer, sampling=ENDLESS)


def test_an_archive_that_fails_meanwhile_does_not_stop_the_answer(harbour, monkeypatch):
    client = halfway(harbour)
    monkeypatch.setattr(harbour.memory, "archive", refuse)
    answer = client.say("Tell me everything.", max_tokens=300)
    assert len(answer.ids) == 300
    assert {(eviction.archived, eviction.error) for eviction in answer.evictions} == {(False, "No.")}
    monkeypatch.undo()
    again = client.say("More.")
    assert not again.evictions
    assert len(harbour.archived_texts()) == answer.evictions[-1].out


def refuse(*args: object, **more: object) -> int:
    raise MemoryFailed("No.")
