from __future__ import annotations

import random

import pytest

from emberkeep.chat.grammar import Grammars
from emberkeep.chat.template import ChatTemplate
from emberkeep.chat.traits import TAGGED_JSON, CallWriting
from emberkeep.types import Request, Tool, ToolChoice
from helpers.answers import read_text
from helpers.byte_vocab import TinyVocab
from helpers.masked_walk import walk

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
    assert template(calls).writing == writing


@pytest.mark.parametrize("calls", [TAGS, "<call>{{ m.tool_calls | tojson }}</call>"])
def test_calls_that_are_not_json_or_not_readable_are_written_as_tagged_json(calls: str) -> None:
    assert template(calls).supports_tools
    assert template(calls).writing == TAGGED_JSON


def test_a_template_without_tools_has_tagged_json() -> None:
    assert ChatTemplate.default().writing == TAGGED_JSON


@pytest.mark.parametrize("calls", [TAGGED, LISTED, NAMED, BARE])
@pytest.mark.parametrize("specials", [("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "<|im_end|>"), ("<|im_end|>",)])
def test_required_calls_are_as_the_model_writes_them(calls: str, specials: tuple[str, ...]) -> None:
    vocab = TinyVocab(specials)
    city = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]}
    tools = (Tool("weather", "", {**city, "additionalProperties": False}),)
    request = Request(prompt="", tools=tools, tool_choice=ToolChoice("required"))
    constraint = Grammars(vocab, template(calls).writing).constraint_for(request)
    assert constraint is not None
    for seed in range(5):
        ids = walk(vocab, constraint.matcher(), random.Random(seed).randrange(99))
        answer = read_text(vocab, [vocab.pieces[token].decode() for token in ids], tools=tools)
        assert answer.names
        assert all(name == "weather" and arguments["city"] in ("Bern", "Rome") for name, arguments in answer.calls)
        assert answer.text == ""
