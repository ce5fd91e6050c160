from __future__ import annotations

import random

import pytest

from emberkeep.chat.grammar import Grammars
from emberkeep.chat.messages import later_systems_in_users
from emberkeep.chat.template import ChatTemplate
from emberkeep.chat.traits import TAGGED_JSON, CallWriting
from emberkeep.types.request import Message, Request, Tool, ToolChoice
from helpers.byte_vocab import TinyVocab, read_text, walk
from helpers.chance import seed, times

_FRAME = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}
{%- if m.tool_calls %}CALLS{% endif %}<|im_end|>
{%- endfor %}"""

_EACH = "{% for c in m.tool_calls %}EACH{{ SEPARATOR if not loop.last }}{% endfor %}"
_JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
TAGGED = _EACH.replace("EACH", f"<tool_call>\n{_JSON}\n</tool_call>").replace("SEPARATOR", "'\\n'")
LISTED = f"[TOOL_CALLS][{_EACH.replace('EACH', _JSON).replace('SEPARATOR', repr(', '))}]"
NAMED = _EACH.replace("EACH", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}")
NAMED = NAMED.replace("SEPARATOR", "''")
BARE = """{% if m.tool_calls | length > 1 %}{{ raise_exception("one call only") }}{% endif %}
{%- set c = m.tool_calls[0].function %}{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}"""
TAGS = """<tool_call><function={{ m.tool_calls[0].function.name }}>
{%- for k, v in m.tool_calls[0].function.arguments.items() %}<parameter={{ k }}>{{ v }}</parameter>{% endfor -%}
</function></tool_call>"""


def template(calls: str) -> ChatTemplate:
    return ChatTemplate(_FRAME.replace("CALLS", calls), bos="", eos="<|im_end|>")


@pytest.mark.parametrize(
    ("calls", "writing"),
    [
        (TAGGED, TAGGED_JSON),
        (LISTED, CallWriting('[TOOL_CALLS][{"name": "', '", "arguments": ', '}, {"name": "', "}]")),
        (NAMED, CallWriting("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", "")),
        (BARE, CallWriting('{"name": "', '", "parameters": ', None, "}")),
    ],
)
def test_a_template_shows_how_its_model_writes_calls(calls: str, writing: CallWriting) -> None:
    assert template(calls).traits.writing == writing


@pytest.mark.parametrize("calls", [TAGS, "<call>{{ m.tool_calls | tojson }}</call>"])
def test_calls_that_are_not_json_or_not_readable_are_written_as_tagged_json(calls: str) -> None:
    assert template(calls).traits.supports_tools
    assert template(calls).traits.writing == TAGGED_JSON


def test_a_template_without_tools_has_tagged_json() -> None:
    assert ChatTemplate.default().traits.writing == TAGGED_JSON


@pytest.mark.parametrize("calls", [TAGGED, LISTED, NAMED, BARE])
@pytest.mark.parametrize("specials", [("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "<|im_end|>"), ("<|im_end|>",)])
def test_required_calls_are_as_the_model_writes_them(calls: str, specials: tuple[str, ...]) -> None:
    vocab = TinyVocab(specials)
    city = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]}
    tools = (Tool("weather", "", {**city, "additionalProperties": False}),)
    request = Request(prompt="", tools=tools, tool_choice=ToolChoice("required"))
    constraint = Grammars(vocab, template(calls).traits.writing).constraint_for(request)
    assert constraint is not None
    for number in range(times(5)):
        ids = walk(vocab, constraint.matcher(), random.Random(seed(number)).randrange(99))
        answer = read_text(vocab, [vocab.pieces[token].decode() for token in ids], tools=tools)
        assert answer.names
        assert all(name == "weather" and arguments["city"] in ("Bern", "Rome") for name, arguments in answer.calls)
        assert answer.text == ""


# ── what the system says in the middle ──

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role != ('user', 'assistant')[loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + PLAIN.partition("%}")[2]
)
GATHERED = "{% for m in messages if m.role == 'system' %}[{{ m.content }}]{% endfor %}" + PLAIN.replace(
    "in messages", "in messages if m.role != 'system'"
)
CHAT = [
    Message("system", "first"),
    Message("user", "one"),
    Message("assistant", "two"),
    Message("user", "three"),
    Message("system", "later"),
]


def test_a_template_that_writes_later_system_messages_gets_them() -> None:
    written = ChatTemplate(PLAIN, bos="", eos="").render(CHAT)
    assert written.endswith("<|im_start|>user\nthree<|im_end|>\n<|im_start|>system\nlater<|im_end|>\n")


@pytest.mark.parametrize("source", [ALTERNATING, GATHERED])
def test_others_get_them_as_a_part_of_the_users_text(source: str) -> None:
    written = ChatTemplate(source, bos="", eos="").render(CHAT)
    assert written.endswith("<|im_start|>user\nthree\n\n<system>\nlater\n</system><|im_end|>\n")


def test_the_user_goes_on_in_the_same_text() -> None:
    later = [*CHAT[:3], CHAT[4], Message("developer", "more"), CHAT[3]]
    assert later_systems_in_users(later) == [
        *CHAT[:3],
        Message("user", "<system>\nlater\n</system>\n\n<system>\nmore\n</system>\n\nthree"),
    ]


def test_users_that_follow_each_other_stay_as_they_are() -> None:
    twice = [CHAT[0], CHAT[1], CHAT[1]]
    assert later_systems_in_users(twice) == twice
