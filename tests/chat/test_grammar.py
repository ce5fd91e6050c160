from __future__ import annotations

import json
import re
from typing import Any

import pytest

from emberkeep.chat.dialects.table import REASONING
from emberkeep.chat.grammar import Grammars, Matcher
from emberkeep.chat.output import OutputOptions, TextStream
from emberkeep.errors import InvalidField
from emberkeep.types.events import ToolCallDelta
from emberkeep.types.models import Vocab
from emberkeep.types.request import (
    AnswerFormat,
    ChoiceFormat,
    GrammarFormat,
    JsonFormat,
    RegexFormat,
    Request,
    Tool,
    ToolChoice,
)
from helpers.byte_vocab import TinyVocab, allowed, walk

VOCAB = TinyVocab()
GRAMMARS = Grammars(VOCAB)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]}
TOOLS = (Tool("weather", "", {**CITY, "additionalProperties": False}), Tool("time"))


def matcher_for(request: Request) -> Matcher:
    constraint = GRAMMARS.constraint_for(request)
    assert constraint is not None
    return constraint.matcher()


def takes(wanted: AnswerFormat, text: str) -> bool:
    """Whether that is a whole answer."""
    matcher = matcher_for(Request(prompt="", format=wanted))
    ids = list(text.encode())
    if matcher.count_allowed(ids) < len(ids):
        return False
    for token in ids:
        matcher.advance(token)
    return not VOCAB.eog.isdisjoint(allowed(matcher))


def fits_person(value: Any) -> bool:
    return list(value) == ["name", "age"] and len(value["name"]) <= 4 and 0 <= value["age"] <= 99


def test_a_random_walk_under_the_mask_fits_the_schema() -> None:
    for seed in range(20):
        ids = walk(VOCAB, matcher_for(Request(prompt="", format=JsonFormat(PERSON))), seed)
        assert fits_person(json.loads(VOCAB.text(ids)))


@pytest.mark.parametrize(
    "request_",
    [
        Request(prompt="", format=JsonFormat()),
        Request(prompt="", tools=TOOLS, tool_choice=ToolChoice("none"), format=JsonFormat(PERSON)),
    ],
    ids=["no schema", "may not call"],
)
def test_an_answer_that_is_json_is_an_object(request_: Request) -> None:
    assert {VOCAB.pieces[token][:1] for token in allowed(matcher_for(request_))} == {b"{"}


def test_a_complete_answer_allows_only_the_end() -> None:
    matcher = matcher_for(Request(prompt="", format=JsonFormat({"const": 7})))
    matcher.advance(ord("7"))
    assert matcher.finished
    assert set(allowed(matcher)) == VOCAB.eog


def test_matchers_of_one_constraint_do_not_disturb_each_other() -> None:
    constraint = GRAMMARS.constraint_for(Request(prompt="", format=JsonFormat({"enum": ["a", "b"]})))
    assert constraint is not None
    first, second = constraint.matcher(), constraint.matcher()
    for token in b'"a"':
        first.advance(token)
    assert first.finished
    assert not second.finished
    assert allowed(second) == [ord('"')]


def test_nothing_is_constrained_without_a_reason() -> None:
    assert GRAMMARS.constraint_for(Request(prompt="", tools=TOOLS)) is None
    assert GRAMMARS.constraint_for(Request(prompt="")) is None


def test_reasoning_that_the_prompt_opened_is_free() -> None:
    constraint = GRAMMARS.constraint_for(Request(prompt="", format=JsonFormat(PERSON)))
    assert constraint is not None
    matcher = constraint.matcher(REASONING[0])
    for token in VOCAB.tokenize("Hello? </think>"):
        assert matcher.mask() is None
        assert not matcher.finished
        matcher.advance(token)
    assert VOCAB.pieces[allowed(matcher)[0]].startswith(b"{")


def test_a_required_call_is_one_that_the_stream_reads() -> None:
    request = Request(prompt="", tools=TOOLS, tool_choice=ToolChoice("required"), parallel_tool_calls=False)
    names = set()
    for seed in range(12):
        ids = walk(VOCAB, matcher_for(request), seed, limit=3000)
        stream = TextStream(VOCAB, OutputOptions(tools=TOOLS))
        events = [event for token in ids for event in stream.push(token)[0]] + stream.finish()
        deltas = [event for event in events if isinstance(event, ToolCallDelta)]
        assert len(deltas) == len(events)
        arguments = json.loads("".join(delta.arguments for delta in deltas))
        names.add(deltas[0].name)
        if deltas[0].name == "weather":
            assert arguments["city"] in ("Bern", "Rome")
    assert names == {"weather", "time"}


def test_with_tools_and_a_schema_the_answer_is_json_that_fits_or_a_call() -> None:
    request = Request(prompt="", tools=TOOLS, format=JsonFormat(PERSON))
    kinds = set()
    for seed in range(30):
        ids = walk(VOCAB, matcher_for(request), seed, limit=3000)
        stream = TextStream(VOCAB, OutputOptions(tools=TOOLS))
        events = [event for token in ids for event in stream.push(token)[0]] + stream.finish()
        called = any(isinstance(event, ToolCallDelta) for event in events)
        kinds.add(called)
        assert called or fits_person(json.loads(VOCAB.text(ids)))
    assert kinds == {True, False}


def test_a_named_tool_is_called_exactly_once() -> None:
    matcher = matcher_for(Request(prompt="", tools=TOOLS, tool_choice=ToolChoice("named", "weather")))
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    for token in VOCAB.tokenize(text):
        assert token in allowed(matcher)
        matcher.advance(token)
    assert matcher.finished
    assert set(allowed(matcher)) == VOCAB.eog


def test_required_calls_are_one_to_sixteen() -> None:
    matcher = matcher_for(Request(prompt="", tools=TOOLS, tool_choice=ToolChoice("required")))
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    for count in range(16):
        for byte in (call if not count else f"\n{call}").encode():
            matcher.advance(byte)
        assert not VOCAB.eog.isdisjoint(allowed(matcher))
        assert matcher.finished is (count == 15)


@pytest.mark.parametrize(
    ("parameters", "text", "fits"),
    [
        ({}, "{}", True),
        ({}, '{"made_up": 1}', False),
        ({"type": "object"}, '{"made_up": 1}', False),
        ({"type": "object", "properties": {}}, '{"made_up": 1}', False),
        ({"type": "object", "additionalProperties": True}, '{"free": 1}', True),
        (CITY, '{"city": "Rome"}', True),
        (CITY, '{"city": "Rome", "made_up": 1}', False),
        ({**CITY, "additionalProperties": {"type": "integer"}}, '{"city": "Rome", "free": 1}', True),
        ({"$ref": "#/$defs/c", "$defs": {"c": CITY}}, '{"city": "Rome"}', True),
    ],
)
def test_arguments_have_only_keys_that_the_tool_declares(
    parameters: dict[str, Any], text: str, fits: bool
) -> None:
    request = Request(prompt="", tools=(Tool("f", "", parameters),), tool_choice=ToolChoice("named", "f"))
    ids = list(f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'.encode())
    assert (matcher_for(request).count_allowed(ids) == len(ids)) is fits


def test_a_keyword_that_cannot_be_enforced_does_not_stop_a_tool() -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}})
    assert matcher_for(Request(prompt="", tools=(tool,), tool_choice=ToolChoice("required")))


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_a_schema_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkeep.chat.grammar._COMPILE_SECONDS", 0.0)
    huge = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    with pytest.raises(InvalidField, match="too long"):
        GRAMMARS.constraint_for(Request(prompt="", format=JsonFormat(huge)))


@pytest.mark.slow
def test_a_random_walk_over_a_real_vocabulary_fits_the_schema(real_vocab: Vocab) -> None:
    constraint = Grammars(real_vocab).constraint_for(Request(prompt="", format=JsonFormat(PERSON)))
    assert constraint is not None
    for seed in range(20):
        ids = walk(real_vocab, constraint.matcher(), seed)
        text = b"".join(real_vocab.pieces[token] for token in ids).decode()
        assert fits_person(json.loads(text))


def test_a_marker_that_is_a_token_of_the_model_is_written_as_that_token() -> None:
    vocab = TinyVocab(("<tool_call>", "</tool_call>", "<|im_end|>"))
    request = Request(prompt="", tools=TOOLS, tool_choice=ToolChoice("required"), parallel_tool_calls=False)
    constraint = Grammars(vocab).constraint_for(request)
    assert constraint is not None
    ids = walk(vocab, constraint.matcher(), seed=3)
    assert [ids[0], ids[-1]] == [vocab.specials["<tool_call>"], vocab.specials["</tool_call>"]]


LIST = r"""
# a list, as shopping lists are written
root ::= item+   # at least one
item ::= "- " [^\r\n]+ "\n"
"""
NESTED = """
root ::= value
value ::= list | word-1 | word_1 | 1st
list ::= "(" (value
  ("," value)*)? ")"
word-1 ::= [a-c]{1,2}
word_1 ::= "x"
1st ::= "1"
"""


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (RegexFormat(r"[0-9]{3}/[a-z]+"), ["123/a"], ["12/a", "123/"]),
        (RegexFormat("yes|no"), ["yes", "no"], ["yesno", "y"]),
        (ChoiceFormat(("red", "green", 'a "b"\n', "😀")), ["red", 'a "b"\n', "😀"], ["re", "redgreen", "blue"]),
        (GrammarFormat(LIST), ["- milk\n", "- a\n- b\n"], ["milk", "- milk"]),
        (GrammarFormat(NESTED), ["ab", "(a,(x,1),())"], ["abc", "(a,"]),
        (GrammarFormat('root ::= start\nstart ::= "a" start | .'), ["aab", "a\n", "é"], ["ab" * 2]),
        (GrammarFormat(r'root ::= "\u0041" [\U0001F600-\U0001F64F] "\x42" [a\-z]'), ["A😀B-", "A😀Bz"], ["A😀Bb"]),
        (GrammarFormat('start: word " " word\nword: /[a-z]+/'), ["ab cd"], ["ab", "ab "]),
        (GrammarFormat('%llguidance {}\nstart: "a" | "b"'), ["a", "b"], ["ab"]),
    ],
)
def test_an_answer_is_one_that_the_format_describes(wanted: AnswerFormat, good: list[str], bad: list[str]) -> None:
    assert [takes(wanted, text) for text in good] == [True] * len(good)
    assert [takes(wanted, text) for text in bad] == [False] * len(bad)


def asked(wanted: AnswerFormat) -> Request:
    return Request(prompt="", format=wanted)


def called(choice: ToolChoice, *tools: Tool) -> Request:
    return Request(prompt="", tools=tools, tool_choice=choice)


LONG = "a" * 300_000


@pytest.mark.parametrize(
    ("request_", "param", "reason"),
    [
        (asked(JsonFormat({"type": "nonsense"})), "response_format", "nonsense"),
        (asked(JsonFormat({"not": {"type": "string"}})), "response_format", "not"),
        (asked(JsonFormat({"$ref": "http://example.invalid/schema"})), "response_format", "cannot be used"),
        (asked(JsonFormat(deep(100))), "response_format", "nested deeper"),
        (asked(JsonFormat(deep(5000))), "response_format", "nested deeper"),
        (asked(JsonFormat({"enum": [LONG]})), "response_format", "longer than"),
        (asked(JsonFormat({"type": "string", "pattern": "("})), "response_format", "cannot be used"),
        (asked(RegexFormat("(", param="guided_regex")), "guided_regex", "guided_regex: cannot be used"),
        (asked(RegexFormat(LONG, param="guided_regex")), "guided_regex", "guided_regex: is longer"),
        (
            asked(GrammarFormat("root ::= <think>", param="g")),
            "g",
            "g: cannot be used .it names the token <think>",
        ),
        (asked(GrammarFormat("root ::= other", param="g")), "g", "it has no rule 'other'"),
        (asked(GrammarFormat('rule ::= "a"', param="g")), "g", "it has no rule 'root'"),
        (asked(GrammarFormat('root ::= "a', param="g")), "g", "g: cannot be used"),
        (asked(GrammarFormat(r'root ::= "\uD800"', param="g")), "g", "is no character"),
        (asked(GrammarFormat(f"root ::= {'(' * 5000}", param="g")), "g", "nested too deeply"),
        (asked(GrammarFormat("", param="g")), "g", "g: cannot be used"),
        (asked(GrammarFormat("start: nosuch", param="guided_grammar")), "guided_grammar", "cannot be used"),
        (called(ToolChoice("named", "weather"), Tool("time")), "tool_choice", "no tool named 'weather'"),
        (called(ToolChoice("required")), "tool_choice", "no tools"),
    ],
)
def test_what_cannot_be_demanded_is_refused_with_a_reason(request_: Request, param: str, reason: str) -> None:
    with pytest.raises(InvalidField, match=reason) as failure:
        GRAMMARS.constraint_for(request_)
    assert failure.value.param == param


@pytest.mark.parametrize("wanted", [RegexFormat("[0-9]+"), GrammarFormat('root ::= calls\ncalls ::= "7"')])
def test_with_tools_an_answer_of_any_format_may_be_a_call_instead(wanted: AnswerFormat) -> None:
    request = Request(prompt="", tools=TOOLS, format=wanted)
    first = {VOCAB.pieces[token][:1] for token in allowed(matcher_for(request))}
    assert first >= {b"7", b"<"}


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        (OPEN, '{"a": 1}', True),
        (OPEN, '{"b": 1}', False),
        ({**OPEN, "additionalProperties": True}, '{"b": 1}', True),
        ({**OPEN, "additionalProperties": {"type": "integer"}}, '{"b": 1}', True),
        ({"type": "object"}, '{"b": 1}', True),
        ({"type": "object", "properties": {"o": OPEN}}, '{"o": {"b": 1}}', False),
        ({"type": "array", "items": OPEN}, '[{"b": 1}]', False),
        ({"anyOf": [OPEN, {"type": "null"}]}, '{"b": 1}', False),
        ({"$ref": "#/$defs/o", "$defs": {"o": OPEN}}, '{"b": 1}', False),
        ({**OPEN, "required": ["b"]}, '{"b": 1}', True),
        (
            {"allOf": [OPEN, {"type": "object", "properties": {"b": {"type": "integer"}}}]},
            '{"a": 1, "b": 1}',
            True,
        ),
    ],
)
def test_keys_that_a_schema_does_not_declare_are_not_written(
    schema: dict[str, Any], text: str, fits: bool
) -> None:
    assert takes(JsonFormat(schema), text) is fits


def test_where_calls_are_required_only_allowed_tools_can_be_called() -> None:
    choice = ToolChoice("required", allowed=("time",))
    ids = walk(VOCAB, matcher_for(Request(prompt="", tools=TOOLS, tool_choice=choice)), seed=1, limit=3000)
    assert set(re.findall(r'"name": "(\w+)"', VOCAB.text(ids))) == {"time"}
