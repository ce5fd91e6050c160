"""What a request is made of, and where a character of its prompt belongs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emberkeep.chat.messages import (
    cache_keys,
    head_of,
    label_of,
    leaving_turns,
    message_ends,
    place_of,
    stable_head,
)
from emberkeep.chat.template import ChatTemplate
from emberkeep.types.request import Message, Request, Tool, ToolCall

TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WEATHER = Tool("get_weather", "The weather of a city.", {"type": "object", "properties": {"city": {}}})

TIME = Tool("get_time", "The time in a city.", {"type": "object", "properties": {"city": {}}})

CHAT = Request(
    messages=(
        Message("system", "Be brief."),
        Message("user", "What is a river?"),
        Message("assistant", "Water on its way."),
        Message("user", "And a lake?"),
    ),
    tools=(WEATHER, TIME),
)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TOOLS_TEMPLATE, bos="", eos="")


@pytest.fixture(scope="module")
def text(template: ChatTemplate) -> str:
    return template.render(CHAT.messages, CHAT.tools)


@pytest.fixture(scope="module")
def render(template: ChatTemplate):
    return lambda messages, tools: template.render(messages, tools, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("brief", "message 1 (system)"),
        ("river", "message 2 (user)"),
        ("Water", "message 3 (assistant)"),
        ("lake", "message 4 (user)"),
        ("The weather of", "the tool get_weather"),
        ("The time in", "the tool get_time"),
    ],
)
def test_a_place_in_the_prompt_has_a_name(render, text, word, sentence):
    place = place_of(render, CHAT, text, text.index(word))
    assert place.sentence == sentence
    assert place.in_tools == ("tool" in sentence)
    assert place.is_last == (word == "lake")


def test_a_system_message_is_never_just_the_last_one(render, template):
    request = Request(messages=(Message("system", "Be brief."),))
    text = template.render(request.messages)
    assert not place_of(render, request, text, text.index("brief")).is_last


def test_messages_end_where_the_next_begins(render, text):
    ends = message_ends(render, CHAT, text, 3)
    assert [text[:end].rsplit("<|im_start|>", 1)[1].split("\n")[0] for end in ends] == [
        "user",
        "assistant",
        "user",
    ]
    assert text[ends[-1] :] == "<|im_start|>assistant\n"


def test_keys_are_asked_for_in_their_order():
    keys = cache_keys(replace(CHAT, conversation_id="c", cache_key="k"))
    assert keys.affinity == "id:c"
    keys = cache_keys(replace(CHAT, cache_key="k"))
    assert keys.affinity == keys.stable is not None
    bare = replace(CHAT, messages=CHAT.messages[1:], tools=(), cache_key="k")
    assert cache_keys(bare).affinity == cache_keys(bare).prefix
    assert cache_keys(bare).legacy == "key:k"


def test_the_clients_own_hash_of_a_prefix_comes_after_the_stable_part_and_names_no_conversation():
    told = replace(CHAT, prefix_hash="9f", cache_key="k")
    assert cache_keys(replace(told, conversation_id="c")).affinity == "id:c"
    assert cache_keys(told).affinity == cache_keys(CHAT).stable
    bare = replace(told, messages=CHAT.messages[1:], tools=())
    assert cache_keys(bare).affinity == "hash:9f"
    other = replace(bare, messages=(Message("user", "What is a hill?"),))
    assert cache_keys(other).entry != cache_keys(bare).entry
    short = Request(prompt="Hello", cache_key="k", prefix_hash="9f")
    assert cache_keys(short).affinity == cache_keys(short).entry == "hash:9f"
    assert label_of(replace(bare, cache_key=None)).name == ""  # a name would be shown as that of a conversation


def test_turns_of_one_conversation_have_one_key_and_other_conversations_others():
    later = replace(CHAT, messages=(*CHAT.messages, Message("assistant", "Water at rest."), Message("user", "!")))
    assert cache_keys(later).entry == cache_keys(CHAT).entry
    other = replace(CHAT, messages=(CHAT.messages[0], Message("user", "What is a hill?")))
    assert cache_keys(other).entry != cache_keys(CHAT).entry
    assert cache_keys(other).stable == cache_keys(CHAT).stable


@pytest.mark.parametrize(
    "change",
    [
        {"messages": (Message("system", "Be verbose."), *CHAT.messages[1:])},
        {"tools": (WEATHER,)},
        {"tools": (TIME, WEATHER)},
        {"tools": (replace(WEATHER, description="?"), TIME)},
        {"template_args": {"enable_thinking": False}},
    ],
)
def test_whatever_changes_the_stable_part_changes_its_key(change):
    assert cache_keys(replace(CHAT, **change)).stable != cache_keys(CHAT).stable


def test_a_prompt_too_short_to_be_known_by_itself_is_known_by_its_key():
    short = Request(prompt="Hello", cache_key="k")
    assert cache_keys(short).affinity == cache_keys(short).entry == "key:k"
    assert cache_keys(replace(short, cache_key=None)).entry == cache_keys(Request(prompt="Bye")).entry


def test_raw_prompts_are_known_by_their_beginning():
    one, two = Request(prompt="a" * 600 + "b"), Request(prompt="a" * 600 + "c")
    assert cache_keys(one).entry == cache_keys(two).entry
    assert cache_keys(Request(prompt="b" * 20)).entry != cache_keys(one).entry
    assert cache_keys(one).stable is None
    ids = (1, 2, 3) * 9
    assert cache_keys(Request(prompt=ids)).entry != cache_keys(Request(prompt=(*ids, 4))).entry


def test_heads_are_the_first_words():
    assert head_of(CHAT) == "What is a river?"
    assert stable_head(CHAT) == "Be brief."
    assert stable_head(replace(CHAT, messages=CHAT.messages[1:])) == "tools: get_weather, get_time"
    assert head_of(Request(prompt="Once\n upon  a time " + "x" * 200)).startswith("Once upon a time x")
    assert len(head_of(Request(prompt="word " * 100))) == 80
    assert head_of(Request(prompt=(1, 2, 3))) == "3 token ids"


SYSTEM = Message("system", "Be brief.")


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str) -> Message:
    return Message("assistant", text)


def call(*ids: str) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall(id_, "look", "{}") for id_ in ids))


def result(id_: str | None) -> Message:
    return Message("tool", "found", tool_call_id=id_)


@pytest.mark.parametrize(
    ("messages", "leaving"),
    [
        ((SYSTEM, user("1"), answer("1"), user("2"), answer("2"), user("3")), [[1, 2], [3, 4]]),
        ((SYSTEM, user("1"), answer("1"), user("2"), answer("2")), [[1, 2]]),
        ((answer("Hello!"), user("1"), answer("1"), user("2")), [[0], [1, 2]]),
        ((SYSTEM, user("1"), Message("developer", "In French."), answer("1"), user("2")), [[1, 3]]),
        ((user("1"), call("a", "b"), result("a"), result("b"), answer("1"), user("2")), [[0, 1, 2, 3, 4]]),
        ((user("1"), call("a"), result(None), user("2")), [[0, 1, 2]]),
        ((user("1"), call("a", "b"), result("a"), user("2")), []),
        ((user("1"), answer("1"), user("2"), call("a"), user("3"), result("a")), [[0, 1]]),
        ((user("1"), call("a"), user("2"), result("a"), user("3")), []),
        ((SYSTEM, answer("Hello!")), []),
        ((), []),
    ],
)
def test_turns_leave_whole_and_the_last_one_system_messages_and_open_calls_stay(
    messages: tuple[Message, ...], leaving: list[list[int]]
) -> None:
    assert [sorted(turn) for turn in leaving_turns(messages)] == leaving
