"""A conversation goes on when its context is full, in front of a client that sends all of it every time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.chat.prompt import Prompt, PromptBuilder
from emberkeep.errors import ContextExceeded
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Message, ToolCall
from helpers.chance import examples
from helpers.conversing import CONTEXT, SYSTEM, Answer, Client, Harbour, ScriptedEngine, line


def opening(answer: Answer) -> str:
    """What the prompt says up to the last message."""
    return answer.prompt.rpartition("<|im_start|>user\n")[0]


# ── what leaves ──


def test_old_turns_leave_down_to_the_low_water_mark_and_are_archived(harbour):
    client = Client(harbour)
    answer = client.talk_until_full()
    (eviction,) = answer.evictions
    assert eviction.archived
    assert eviction.messages == eviction.out == 2 * len(harbour.archived())
    assert answer.completed.usage.prompt_tokens <= 1.15 * 0.5 * CONTEXT
    assert answer.prompt.startswith(
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n[{eviction.out} earlier "
    )
    assert harbour.archived_texts() == [message.content for message in client.messages[: eviction.out]]
    for message in client.messages[eviction.out : -1]:
        assert f"{message.content}<|im_end|>" in answer.prompt


def test_the_same_messages_stay_out_and_the_prompt_only_grows(harbour):
    client = Client(harbour)
    first = client.talk_until_full()
    for number in range(100, 103):
        answer = client.say(line(number))
        assert answer.prompt.startswith(first.prompt)
        assert not answer.evictions
        assert answer.lookup.reused_tokens > 0.8 * answer.completed.usage.prompt_tokens
        first = answer


def test_only_what_is_new_is_evaluated_when_something_left(harbour):
    client = Client(harbour)
    client.talk_until_full()
    assert harbour.backend.scheduler.counters.cuts == 1
    before = harbour.engine.evaluated_tokens
    answer = client.talk_until_full()
    assert answer.lookup.moved_tokens > 100
    assert answer.lookup.is_approximate
    turns = before + 4 * 110 + 160  # what was said meanwhile, and the notice
    assert harbour.engine.evaluated_tokens < turns


def test_the_answer_may_be_as_short_as_it_likes_the_room_for_it_is_kept_free(harbour):
    """Where its length is unknown, an eighth of the context is kept free."""
    client = Client(harbour, max_tokens=None, stop=("e",))
    for number in range(30):
        assert client.say(line(number)).completed.usage.prompt_tokens <= CONTEXT - CONTEXT // 8


def test_a_tool_call_leaves_with_its_result(harbour):
    client = Client(harbour)
    for i in range(30):
        call = ToolCall(f"c{i}", "ferry", f'{{"pier": {i}}}')
        client.messages += [Message("user", line(i)), Message("assistant", "", tool_calls=(call,))]
        client.messages.append(Message("tool", f"leaves at {i}", tool_call_id=call.id))
        answer = client.go_on()
        assert answer.prompt.count("<tool_call>") == answer.prompt.count("leaves at")
        assert answer.prompt.count("<tool_call>") > 0
    uses = [use for turn in harbour.archived() for use in turn["tool_uses"]]
    assert [use["result"] for use in uses] == [f"leaves at {i}" for i in range(len(uses))]


def test_in_one_long_turn_of_an_agent_the_question_and_the_latest_exchange_stay(harbour):
    client = Client(harbour)
    client.messages.append(Message("user", "Count all ships."))
    evictions = 0
    for i in range(36):
        call = ToolCall(f"c{i}", "ferry", f'{{"pier": {i}}}')
        client.messages.append(Message("assistant", f"Pier {i}. ", tool_calls=(call,)))
        client.messages.append(Message("tool", f"There are {i} ships.", tool_call_id=call.id))
        answer = harbour.ask(client.request())
        evictions += len(answer.evictions)
        assert "Count all ships." in answer.prompt
        assert answer.prompt.count("<tool_call>") == answer.prompt.count("There are ")
        assert f"There are {i} ships.<|im_end|>\n<|im_start|>assistant\n" in answer.prompt
    assert evictions > 1
    counted = [use["result"] for turn in harbour.archived() for use in turn["tool_uses"]]
    assert counted == [f"There are {i} ships." for i in range(len(counted))]
    client.messages.append(Message("assistant", "Many."))
    later = client.talk_until_full()
    texts = harbour.archived_texts()
    assert texts.count("Count all ships.") == 1
    assert not {"Count all ships.", "Many."} & set(later.prompt.split("\n"))


def test_a_question_with_a_call_that_was_never_answered_stays(harbour):
    client = Client(harbour)
    call = ToolCall("c", "ferry", "{}")
    client.messages += [Message("user", "Ask the ferry."), Message("assistant", "", tool_calls=(call,))]
    answer = client.talk_until_full()
    assert "Ask the ferry.<|im_end|>" in answer.prompt
    assert '{"name": "ferry"' in answer.prompt


# ── what is too long ──


@pytest.mark.parametrize("has_evicted", [False, True])
def test_a_message_that_does_not_fit_is_refused_and_nothing_has_left_for_its_sake(harbour, has_evicted):
    client = Client(harbour)
    answer = client.talk_until_full() if has_evicted else [client.say(line(number)) for number in range(4)][-1]
    before = list(harbour.memory.export(""))[1:]
    client.messages.append(Message("user", line(99, words=300)))
    with pytest.raises(ContextExceeded):
        harbour.ask(client.request())
    assert list(harbour.memory.export(""))[1:] == before
    client.messages.pop()
    again = client.say("And?")
    assert again.prompt.startswith(answer.prompt)
    assert not again.evictions


def test_a_message_that_barely_fits_is_answered(harbour):
    client = Client(harbour)
    for number in range(6):
        client.say(line(number))
    room = CONTEXT - 170 - harbour.count_tokens(SYSTEM)
    answer = client.say("x" * room)
    assert answer.evictions
    assert "Remark 5" not in answer.prompt


@pytest.mark.parametrize("evict", [True, False])
def test_a_message_that_cannot_fit_is_refused_before_it_is_tokenized(harbour, monkeypatch, evict):
    monkeypatch.setattr(PromptBuilder, "build", lambda *_: pytest.fail("the text was tokenized"))
    with pytest.raises(ContextExceeded, match="at least") as refusal:
        Client(harbour, evict=evict).say("x" * 100_000)
    assert refusal.value.prompt_tokens > CONTEXT
    assert not refusal.value.is_counted


@pytest.mark.parametrize("how", ["config", "request"])
def test_where_nothing_may_leave_a_long_conversation_is_an_error(tmp_path, how):
    config, fields = ({"too_long": "refuse"}, {}) if how == "config" else ({}, {"evict": False})
    with Harbour(tmp_path, **config) as harbour:
        client = Client(harbour, **fields)
        with pytest.raises(ContextExceeded):
            client.talk_until_full()
        assert harbour.archived() == []
        assert client.go_on(evict=True).evictions


# ── histories that were never here before ──


def long_history(turns: int) -> list[Message]:
    return [
        message for i in range(turns) for message in (Message("user", line(i)), Message("assistant", f"Yes {i}."))
    ]


def test_a_history_of_many_contexts_is_not_read_as_a_whole_but_archived_as_one(harbour, monkeypatch):
    client = Client(harbour)
    client.messages = long_history(300)
    tokenized: list[int] = []
    tokenize = harbour.engine.vocab.tokenize

    def counted(text: str, **how: bool) -> list[int]:
        ids = tokenize(text, **how)
        tokenized.append(len(ids))
        return ids

    monkeypatch.setattr(harbour.engine.vocab, "tokenize", counted)
    answer = client.say("Where were we?")
    assert sum(tokenized) < 12 * CONTEXT  # all of it would be thirty
    (eviction,) = answer.evictions
    assert eviction.out == len(harbour.archived_texts()) > 580
    assert set(harbour.archived_texts()) | set(answer.prompt.replace("<|im_end|>", "").split("\n")) >= {
        message.content for message in client.messages[:-1]
    }
    again = client.say("And before that?")
    assert not again.evictions
    assert again.prompt.startswith(answer.prompt)


def test_a_long_history_in_few_tokens_stays_shortened(harbour, monkeypatch):
    """Its text is much longer than its tokens: what left it is counted all the same."""
    client = Client(harbour)
    blank = "<|endoftext|>" * 120  # a token each
    for i in range(40):
        client.messages += [Message("user", f"Go {i}."), Message("assistant", blank)]
    drafts: list[int] = []
    build = PromptBuilder.build

    def counted(self: PromptBuilder, *of: Any) -> Prompt:
        made = build(self, *of)
        drafts.append(len(made))
        return made

    monkeypatch.setattr(PromptBuilder, "build", counted)
    answers = [client.say(f"Go on {i}.") for i in range(3)]
    assert max(drafts) < 2 * CONTEXT  # all of it would be several
    assert [len(answer.evictions) for answer in answers] == [1, 0, 0]
    assert answers[2].prompt.startswith(answers[1].prompt)


# ── whose it is ──


def test_two_conversations_that_begin_alike_archive_what_they_share_once(harbour):
    one, two = Client(harbour), Client(harbour)
    first = one.talk_until_full()
    once = harbour.archived()
    two.messages = one.messages[:-2]
    one.say("Left.")
    right = two.say("Right.")
    assert not right.evictions
    assert opening(right) == opening(first)
    assert harbour.archived() == once
    for client in (one, two):
        while not client.say(line(len(client.messages))).evictions:
            pass
    texts = harbour.archived_texts()
    assert len(texts) == len(set(texts))
    assert {"Left.", "Right."} <= set(texts)


def test_a_system_message_that_is_another_on_every_turn_changes_nothing(harbour):
    client = Client(harbour)
    evictions = 0
    for number in range(30):
        client.system = f"It is {number} o'clock."
        answer = client.say(line(number))
        evictions += len(answer.evictions)
        assert f"It is {number} o'clock." in answer.prompt
    assert 2 <= evictions <= 8
    texts = harbour.archived_texts()
    assert len(texts) == len(set(texts)) > 10


# ── for any conversation ──


@pytest.fixture(scope="module")
def shared_harbour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbour]:
    with Harbour(tmp_path_factory.mktemp("shared"), recall="off") as harbour:
        yield harbour


talks = st.lists(st.tuples(st.integers(1, 50), st.sampled_from([0, 1, 4, 40, None])), min_size=6, max_size=24)
_serial = iter(range(1 << 30))


@given(talks, st.booleans(), st.booleans())
@examples(8)
def test_any_conversation_goes_on_and_nothing_is_lost(shared_harbour, turns, is_exact, is_named):
    harbour, number = shared_harbour, next(_serial)
    owner = f"user-{number}"
    fields = {"approximate": False} if is_exact else {}
    client = Client(harbour, user=owner, conversation_id="talk" if is_named else None, **fields)
    before, out = "", 0
    for i, (words, max_tokens) in enumerate(turns):
        answer = client.say(line(1000 * number + i, words), max_tokens=max_tokens, stop=("e",))
        assert answer.prompt.startswith(f"<|im_start|>system\n{SYSTEM}")
        assert client.messages[-2].content in answer.prompt
        assert answer.completed.usage.prompt_tokens <= CONTEXT
        if is_exact:
            assert not answer.lookup.is_approximate
        shown_out = told_out(answer)
        if shown_out == out:
            assert answer.prompt.startswith(before)
        else:
            assert shown_out == answer.evictions[0].out
        assert [text for text in said(client) if text in answer.prompt] == said(client)[shown_out // 2 :]
        out = answer.evictions[-1].out if answer.evictions else out
        before = opening(answer) if out == shown_out else ""  # it was shortened while it was answered
    archived = [turn["user_text"] for turn in harbour.archived(private_namespace(owner))]
    assert archived == said(client)[: out // 2]


def told_out(answer: Answer) -> int:
    """How many messages are out, as the prompt tells it."""
    told = re.search(r"\[(\d+) earlier message", answer.prompt)
    return int(told[1]) if told else 0


def said(client: Client) -> list[str]:
    return [message.content for message in client.messages if message.role == "user"]


def test_what_leaves_is_chosen_in_a_few_steps(harbour, monkeypatch):
    client = Client(harbour)
    client.messages = long_history(12)
    drafts = []
    shorten = PromptBuilder.shorten

    def counted(self, *args):
        drafts.append(args)
        return shorten(self, *args)

    monkeypatch.setattr(PromptBuilder, "shorten", counted)
    assert client.say("Go on.").evictions
    assert len(drafts) <= 3


def test_a_system_message_that_fills_more_than_half_leaves_room_for_several_turns(tmp_path):
    context = 2 * CONTEXT
    with Harbour(tmp_path, ScriptedEngine(context=context), recall="off") as harbour:
        client = Client(harbour, system="Be brief. " * (context * 6 // 100))
        answers = [client.say(line(i)) for i in range(40)]
    evicting = [i for i, answer in enumerate(answers) if answer.evictions]
    assert len(evicting) > 2
    assert min(b - a for a, b in pairwise(evicting)) > 1
    assert min(answer.prompt.count("<|im_start|>user") for answer in answers[evicting[0] :]) > 1
