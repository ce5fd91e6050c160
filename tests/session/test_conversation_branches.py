"""Clients edit, regenerate and go back: what they send decides what is out, and which spliced state fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emberkeep.types.events import MissReason
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Message, Request
from helpers.conversing import SYSTEM, Client, Harbour, line


def branch(client: Client, harbour: Harbour, length: int) -> Client:
    """Another conversation with the same beginning."""
    other = Client(harbour)
    other.messages = client.messages[:length]
    return other


def texts_once(harbour: Harbour) -> bool:
    keys = [turn["key"] for turn in harbour.archived()]
    return len(keys) == len(set(keys))


# ── branches ──


def test_a_regenerated_answer_sees_what_the_first_one_saw(harbour):
    client = Client(harbour)
    first = client.talk_until_full()
    client.messages.pop()
    again = client.go_on()
    assert again.prompt == first.prompt
    assert not again.evictions
    assert again.lookup.reused_tokens == again.completed.usage.prompt_tokens - 1


def test_a_short_branch_that_fits_is_shown_whole_and_exact(harbour):
    client = Client(harbour)
    client.talk_until_full()
    short = branch(client, harbour, 12)
    answer = short.say("Back to the harbour.")
    assert not answer.evictions
    assert answer.prompt.count("Remark") == 6
    assert "left the context" not in answer.prompt
    assert answer.text == short.messages[-1].content
    assert not answer.lookup.is_approximate
    assert answer.ids == harbour.fresh(answer)
    long = client.say("And here?")
    assert "left the context" in long.prompt


def test_a_short_branch_becomes_long_again(harbour):
    client = Client(harbour)
    client.talk_until_full()
    short = branch(client, harbour, 12)
    shown = [short.say(line(number)) for number in range(200, 212)]
    assert "left the context" not in shown[0].prompt
    assert "left the context" in shown[-1].prompt
    assert texts_once(harbour)
    assert sum(len(answer.evictions) for answer in shown) < 5


def test_an_old_message_that_was_edited_makes_another_conversation_from_there_on(harbour):
    client = Client(harbour)
    client.talk_until_full()
    before = len(harbour.archived())
    edited = client.messages[4].content[::-1]
    client.messages[4] = replace(client.messages[4], content=edited)
    answer = client.say("And now?")
    assert answer.evictions[0].archived
    texts = harbour.archived_texts()
    assert texts.count(edited) == 1
    assert texts.count(client.messages[0].content) == 1  # it was there before the edit
    assert len(harbour.archived()) > before
    assert not client.say("Well?").evictions


def test_an_edit_of_what_is_still_there_keeps_what_left_out(harbour):
    client = Client(harbour)
    first = client.talk_until_full()
    client.messages[-2:] = []
    client.messages[-1] = Message("assistant", "Edited.")
    answer = client.say("And now?")
    assert not answer.evictions
    common = first.prompt.index("Remark")
    assert answer.prompt[:common] == first.prompt[:common]
    assert "Edited." in answer.prompt


def test_a_client_that_drops_old_messages_itself_is_answered(harbour):
    client = Client(harbour)
    for number in range(30):
        client.messages = client.messages[-8:]
        answer = client.say(line(number))
        assert not answer.evictions
        assert answer.prompt.count("Remark") == min(number + 1, 5)
    assert harbour.archived() == []


def test_a_client_that_drops_some_of_what_left_goes_on(harbour):
    client = Client(harbour, conversation_id="talk")
    client.talk_until_full()
    client.messages = client.messages[2:]
    answer = client.say("Do you see this?")
    assert answer.prompt.count("Remark") <= 8
    assert "Do you see this?" in answer.prompt


def test_what_is_out_is_known_by_the_history_with_and_without_a_name(harbour):
    named, plain = Client(harbour, conversation_id="talk"), Client(harbour)
    named.talk_until_full()
    plain.messages = list(named.messages)
    answer = plain.say("Hello?")
    assert answer.evictions  # nothing says that it is the same one
    assert not named.say("Hello?").evictions


# ── exact ──


def test_exact_answers_are_those_of_the_shorter_prompt_alone(harbour):
    client = Client(harbour, approximate=False)
    evictions = 0
    for number in range(24):
        answer = client.say(line(number))
        evictions += len(answer.evictions)
        assert not answer.lookup.is_approximate
        assert answer.ids == harbour.fresh(answer)
    assert evictions >= 3


def test_the_same_where_everything_is_exact(tmp_path):
    with Harbour(tmp_path, approximate="never") as harbour:
        client = Client(harbour)
        answer = client.talk_until_full()
        assert answer.lookup.moved_tokens == 0
        assert answer.ids == harbour.fresh(answer)
        again = client.say("More.")
        assert again.lookup.reused_tokens > 300
        assert again.ids == harbour.fresh(again)


# ── whose spliced state it is ──


def same_prompt(harbour: Harbour, client: Client, **fields: object) -> Request:
    """What the model sees of a shortened conversation, as one that nothing has left."""
    request = client.request()
    return replace(request, messages=harbour.backend._sessions.view(request).messages, **fields)


def shortened(harbour: Harbour, **fields: object) -> Client:
    client = Client(harbour, **fields)
    client.talk_until_full()
    client.messages.pop()
    return client


@pytest.mark.parametrize("name", ["plain", "named"])
def test_another_conversation_with_the_same_words_does_not(harbour, name):
    client = shortened(harbour, conversation_id="one")
    other = same_prompt(harbour, client, conversation_id="two" if name == "named" else None)
    answer = harbour.ask(other)
    assert answer.completed.usage.prompt_tokens == harbour.ask(client.request()).completed.usage.prompt_tokens
    assert not answer.lookup.is_approximate
    assert answer.ids == harbour.fresh(answer)


def test_one_that_is_shortened_to_the_same_words_does_not_either(harbour):
    """Its messages are the same but for the first, which has left: spliced state depends on which one it was."""
    one, two = Client(harbour, conversation_id="one"), Client(harbour, conversation_id="two")
    first = one.talk_until_full()
    two.messages = one.messages[:-1]
    two.messages[0] = Message("user", one.messages[0].content[::-1])
    second = harbour.ask(two.request())
    assert second.prompt == first.prompt
    assert second.lookup.reused_tokens < 100
    assert not second.lookup.is_approximate
    assert second.ids == harbour.fresh(second)


def test_exact_requests_never_find_it(harbour):
    client = shortened(harbour)
    answer = harbour.ask(client.request(approximate=False))
    assert not answer.lookup.is_approximate
    assert answer.ids == harbour.fresh(answer)
    prompt = answer.prompt
    raw = harbour.ask(Request(prompt=prompt, max_tokens=4, sampling=client.request().sampling))
    assert not raw.lookup.is_approximate


def test_other_users_never_find_it(harbour):
    shortened(harbour, user="ann", conversation_id="talk")
    bob = shortened(harbour, user="bob", conversation_id="talk")
    assert harbour.ask(bob.request()).lookup.is_approximate
    mallory = replace(bob.request(), user="mallory", namespace=private_namespace("mallory"))
    answer = harbour.ask(mallory)
    assert answer.evictions  # nothing is known of hers
    assert answer.lookup.cached_tokens == 0
    assert answer.ids == harbour.fresh(answer)


# ── explained ──


def test_a_shortened_conversation_is_explained_as_it_would_be_answered(harbour):
    client = shortened(harbour)
    told = harbour.backend.cache.explain(client.request())
    assert told.lookup.reason is MissReason.NONE
    answer = harbour.ask(client.request())
    assert told.lookup.prompt_tokens == answer.completed.usage.prompt_tokens
    assert told.lookup.reused_tokens == answer.lookup.reused_tokens


def test_explaining_writes_nothing(harbour):
    client = Client(harbour)
    for number in range(8):
        client.say(line(number))
    client.messages.append(Message("user", line(8)))
    stats = harbour.backend.stats()["sessions"]
    told = harbour.backend.cache.explain(client.request())
    assert told.lookup.prompt_tokens < 500  # as it would be shortened
    assert list(harbour.memory.export(""))[1:] == []
    assert harbour.backend.stats()["sessions"] == stats
    assert client.go_on().evictions


# ── together ──


def test_requests_of_one_conversation_at_once_archive_everything_once(harbour):
    client = Client(harbour)
    client.messages = [Message(role, line(i)) for i in range(30) for role in ("user", "assistant")]
    requests = []
    for i in range(4):
        client.messages.append(Message("user", f"Question {i}"))
        requests += [client.request(), client.request()]
        client.messages.pop()
    answers = harbour.ask_together(requests)
    assert all(answer.completed.usage.prompt_tokens < 700 for answer in answers)
    assert texts_once(harbour)
    assert {turn["user_text"] for turn in harbour.archived()} == {line(i) for i in range(len(harbour.archived()))}


def test_many_conversations_at_once_do_not_touch_each_other(tmp_path):
    with Harbour(tmp_path, recall="off", parallel=4) as harbour:
        clients = [Client(harbour, user=f"u{i % 3}", conversation_id=f"c{i}") for i in range(6)]
        for number in range(10):
            for client in clients:
                client.messages.append(Message("user", line(number)))
            answers = harbour.ask_together([client.request() for client in clients])
            for client, answer in zip(clients, answers, strict=True):
                client.messages.append(Message("assistant", answer.text))
        for i in range(3):
            turns = harbour.archived(private_namespace(f"u{i}"))
            assert {turn["conversation"] for turn in turns} == {f"c{j}" for j in (i, i + 3)}
            assert len({turn["key"] for turn in turns}) == len(turns)
            for name in {turn["conversation"] for turn in turns}:
                said = [turn["user_text"] for turn in turns if turn["conversation"] == name]
                assert said == [line(number) for number in range(len(said))]


# ── after a restart ──


def test_a_second_process_goes_on_with_the_same_messages_out_and_with_the_state(tmp_path):
    with Harbour(tmp_path, recall="off", disk_budget=1 << 30) as harbour:
        client = Client(harbour)
        before = client.talk_until_full()
    with Harbour(tmp_path, recall="off", disk_budget=1 << 30) as harbour:
        later = Client(harbour)
        later.messages = client.messages
        answer = later.say("Where were we?")
        assert not answer.evictions
        assert answer.prompt.startswith(before.prompt)
        assert answer.prompt.count(SYSTEM) == 1
        assert answer.lookup.cold_tokens > 0.8 * answer.completed.usage.prompt_tokens
        assert answer.lookup.is_approximate
