from __future__ import annotations

import json
from contextlib import suppress

import pytest

from emberkeep.chat.messages import canonical_tools
from emberkeep.chat.template import CHATML, ChatTemplate
from emberkeep.errors import TemplateFailed
from emberkeep.types.request import Message, Tool, ToolCall

LLAMA3 = """{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

MISTRAL = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
    {%- else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}
{%- endfor %}"""

PHI3 = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor -%}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

WITH_TOOLS = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] %}CALL {{ call.function.name }}
{%- for key, value in call.function.arguments | items %} {{ key }}={{ value }}{% endfor %}{% endfor %}
{% endfor %}"""

# Wants JSON text as arguments, a null content, and ids of nine characters.
PICKY_TOOLS = """{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
    {%- if m.tool_call_id is defined and m.tool_call_id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}
    {%- if m.role == 'assistant' and m.content is none %}
        {%- for call in m.tool_calls %}{{ call.function.name + ': ' + call.function.arguments }}{% endfor %}
    {%- else %}{{ m.content }}{% endif %}
{% endfor %}"""

HELLO = [Message("user", "Hello")]
WEATHER = Tool("weather", "The weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALLED = [
    Message("user", "Is it warm?"),
    Message("assistant", "", tool_calls=(ToolCall("call_1", "weather", '{"city":"Bern"}'),)),
    Message("tool", "21 C", tool_call_id="call_1"),
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>")


@pytest.mark.parametrize(
    ("source", "turn_end"),
    [
        (CHATML, "<|im_end|>\n"),
        (LLAMA3, "<|eot_id|>"),
        (GEMMA, "<end_of_turn>\n"),
        (MISTRAL, "</s>"),
        (PHI3, "<|end|>\n"),
        ("{{ messages[0].content }}", ""),
        ("{{ raise_exception('never') }}", ""),
    ],
)
def test_the_end_of_a_turn_is_found_without_the_next_header(source: str, turn_end: str) -> None:
    assert template(source).traits.turn_end == turn_end


@pytest.mark.parametrize("source", [CHATML, LLAMA3, GEMMA, MISTRAL])
def test_a_finished_turn_is_a_prefix_of_the_next_prompt(source: str) -> None:
    chat = template(source)
    prompt = chat.render(HELLO)
    following = chat.render([*HELLO, Message("assistant", "Hi!"), Message("user", "Bye")])
    written = following.index("Hi!")
    assert following.startswith(prompt)
    assert following[written:].startswith("Hi!" + chat.traits.turn_end)


def test_a_prompt_has_its_special_texts_and_the_generation_header() -> None:
    prompt = template(LLAMA3).render([Message("system", " Be kind. "), *HELLO])
    assert prompt == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_a_developer_message_is_a_system_message() -> None:
    assert "<|im_start|>system\nBe kind." in ChatTemplate.default().render([Message("developer", "Be kind.")])


def test_a_template_that_refuses_system_messages_gets_them_before_the_users_text() -> None:
    prompt = template(GEMMA).render([Message("system", "Be kind."), *HELLO])
    assert "<start_of_turn>user\nBe kind.\n\nHello<end_of_turn>" in prompt


def test_a_refusal_tells_the_templates_reason() -> None:
    with pytest.raises(TemplateFailed, match="Roles must alternate") as failure:
        template(GEMMA).render([*HELLO, *HELLO])
    assert failure.value.param == "messages"


def test_template_arguments_reach_the_template_but_cannot_replace_the_messages() -> None:
    chat = template("{{ enable_thinking }}{{ messages | length }}{{ bos_token }}")
    args = {"enable_thinking": "no", "messages": [], "bos_token": "X"}
    assert chat.render(HELLO, args=args) == "no1<s>"


def test_reasoning_is_there_for_templates_that_ask() -> None:
    chat = template("{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}{% endfor %}")
    assert chat.render([Message("assistant", "4", reasoning="2+2")]) == "2+2|4"


# ── tools ──


def test_tools_in_another_key_order_give_the_same_prompt() -> None:
    a = Tool("f", "d", {"type": "object", "properties": {"x": {"type": "string", "enum": ["b", "a"]}}})
    b = Tool("f", "d", {"properties": {"x": {"enum": ["b", "a"], "type": "string"}}, "type": "object"})
    assert json.dumps(canonical_tools([a])) == json.dumps(canonical_tools([b]))
    for source in (CHATML, WITH_TOOLS):
        assert template(source).render(HELLO, [a]) == template(source).render(HELLO, [b])


def test_a_template_with_tools_writes_them_itself() -> None:
    chat = template(WITH_TOOLS)
    prompt = chat.render(CALLED, [WEATHER])
    assert chat.traits.supports_tools
    assert '"name": "weather"' in prompt
    assert "[assistant]CALL weather city=Bern" in prompt
    assert "[tool]21 C" in prompt


def test_a_template_with_wishes_about_calls_gets_them() -> None:
    chat = template(PICKY_TOOLS)
    assert chat.traits.supports_tools
    assert 'weather: {"city":"Bern"}' in chat.render(CALLED, [WEATHER])


def test_a_template_without_tools_gets_them_as_text() -> None:
    chat = ChatTemplate.default()
    prompt = chat.render([Message("system", "Be kind."), *CALLED], [WEATHER])
    assert not chat.traits.supports_tools
    assert prompt.startswith("<|im_start|>system\nBe kind.\n\n")
    assert prompt.count("<|im_start|>system") == 1
    assert json.dumps(canonical_tools([WEATHER])[0]) in prompt
    call = '<tool_call>\n{"name": "weather", "arguments": {"city":"Bern"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\n21 C\n</tool_response><|im_end|>" in prompt


def test_tools_as_text_open_a_conversation_that_has_no_system_message() -> None:
    assert ChatTemplate.default().render(HELLO, [WEATHER]).startswith("<|im_start|>system\n")


# ── what Hugging Face templates use ──


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% for x in 'ab' | reverse %}{{ x }}{{ loop.length }}{{ loop.last }}{% endfor %}", "b2Falsea2True"),
        ("{% generation %}{{ messages[0].content.split('l')[-1] }}{% endgeneration %}", "o"),
        ("{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}", "1"),
        ("{% macro f(x, context) %}{{ x ~ context }}{% endmacro %}{{ f('a', context='b') }}", "ab"),
        ("{{ messages | selectattr('role', '==', 'user') | map(attribute='content') | join(', ') }}", "Hello"),
        ("{{ messages[0]['content'].replace('l', 'L') | replace('H', 'h') }}{{ tools is none }}", "heLLoTrue"),
        ("{% for m in messages %}{{ m.content.replace('l', '') ~ ''.join(['a', 'b']) }}{% endfor %}", "Heoab"),
        ("{% for m in messages %}{{ '{} {x}'.format(m.content, x=1) }}{% endfor %}", "Hello 1"),
        ("{% for tool in tools %}{{ tool.name }}{% endfor %}no tools", "no tools"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)  # fmt: skip
def test_the_jinja_of_model_templates_works(source: str, text: str) -> None:
    assert template(source).render(HELLO) == text


# ── hostile templates ──


@pytest.mark.parametrize(
    "source", ["{{ (", "{% for %}", "{{ " + "(" * 5000 + " }}", "{{ x | nosuch }}", "x" * (2 << 20)]
)
def test_a_source_that_is_no_template_is_refused_at_once(source: str) -> None:
    with pytest.raises(TemplateFailed, match="not valid Jinja"):
        template(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ namespace(a=1).__class__.__mro__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ messages[0] | attr('__class__') }}",
    ],
)
def test_a_template_cannot_reach_python(source: str) -> None:
    with suppress(TemplateFailed):
        assert template(source).render(HELLO) == ""


@pytest.mark.parametrize(
    ("source", "seconds", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", 1.0, "takes too long"),
        ("{{ messages[0].content * 10**9 }}", 60.0, "needs too much memory"),
        (
            "{% for i in range(30) %}{{ messages[0].content * 90000 }}{% endfor %}",
            60.0,
            "more text than is allowed",
        ),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}", 60.0, "refused these messages"),
    ],
)
def test_a_template_that_takes_too_much_is_stopped(
    source: str, seconds: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberkeep.chat.template.MAX_SECONDS", seconds)
    with pytest.raises(TemplateFailed, match=reason):
        template(source).render(HELLO)
