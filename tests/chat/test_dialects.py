from __future__ import annotations

import re
from itertools import permutations

import pytest

from emberkeep.chat.dialects.reader import Tape
from emberkeep.chat.dialects.table import MARKED_DIALECTS, REASONING, STRAY_ENDS, tag_dialects
from emberkeep.chat.output import OutputOptions, TextStream, hidden_tokens
from emberkeep.types.events import Event, ToolCallDelta
from emberkeep.types.request import Tool
from helpers.byte_vocab import Answer, TinyVocab, read_text

VOCAB = TinyVocab()
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}}
TOOLS = (Tool("write", "", {}), Tool("list", "", SCHEMA))


def answered(text: str, **options: object) -> Answer:
    return read_text(VOCAB, list(text), tools=TOOLS, **options)


def deltas(text: str) -> list[ToolCallDelta]:
    stream = TextStream(VOCAB, OutputOptions(tools=TOOLS))
    events: list[Event] = [event for byte in text.encode() for event in stream.push(byte)[0]]
    return [event for event in events if isinstance(event, ToolCallDelta)]


# ── arguments while they are written ──


@pytest.mark.parametrize(
    "begun",
    [
        '<tool_call>{"name": "write", "arguments": {"path": "a", "text": "one two',
        '{"name": "write", "parameters": {"path": "a", "text": "one two',
        '```json\n{"name": "write", "arguments": {"path": "a", "text": "one two',
        '[TOOL_CALLS]write[ARGS]{"path": "a", "text": "one two',
        '[TOOL_CALLS][{"name": "write", "arguments": {"path": "a", "text": "one two',
        '<function=write>{"path": "a", "text": "one two',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>{"path": "a", "text": "one two',
    ],
)
def test_json_arguments_come_as_they_are_written(begun: str) -> None:
    first, *rest = deltas(begun)
    assert (first.name, first.id is not None) == ("write", True)
    assert all(delta.id is None and delta.name is None for delta in rest)
    assert "".join(delta.arguments for delta in (first, *rest)) == '{"path": "a", "text": "one two'


def test_arguments_in_tags_come_one_by_one() -> None:
    whole = deltas("<function=list><parameter=path>src</parameter><parameter=depth>2</parameter></function>")
    assert [delta.arguments for delta in whole] == ["", '{"path": "src"', ', "depth": 2', "}"]


@pytest.mark.parametrize(
    "begun",
    [
        '{"name": "write',
        '{"name": "write", "arguments": {',
        '{"name": "write", "arguments": "{}',
        '{"name": "other", "arguments": {"path": "a',
        '{"arguments": {"path": "a"}',
        '<tool_call>{"arguments": {"path": "a"}, "na',
        "[write(path='a'",
        "<function=other><parameter=path>a</parameter>",
    ],
)
def test_what_is_not_certain_is_held_back(begun: str) -> None:
    assert deltas(begun) == []


def test_arguments_before_the_name_come_with_it() -> None:
    (delta,) = deltas('<tool_call>{"arguments": {"path": "a"}, "name": "write"')
    assert (delta.name, delta.arguments) == ("write", '{"path": "a"}')


# ── what models get wrong ──


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "write", "arguments": {"a": 1}', {"a": 1}),
        ('{"name": "write", "arguments": {"a": 1', {"a": 1}),
        ('{"name": "write", "arguments": {"a": [1, {"b": 2', {"a": [1, {"b": 2}]}),
        ('{"name": "write", "arguments": {"a": 1}}}}', {"a": 1}),
        ('{{"name": "write", "arguments": {"a": 1}}}', {"a": 1}),
        ('{"name": "write", "arguments": {"a": 1,}}', {"a": 1}),
        ('{"name": "write", "arguments": {"a": "x\ty\nz"}}', {"a": "x\ty\nz"}),
        ('{"name": "write", "arguments": {"a": "\\d+ \\u00"}}', {"a": "\\d+ \\u00"}),
        ('{"name": "write", "arguments": null}', {}),
        ('{"name": "write", "arguments": ""}', {}),
        ('{"tool_calls": [{"type": "function", "function": {"name": "write", "arguments": "{}"}}]}', {}),
    ],
)
def test_small_mistakes_are_mended(written: str, arguments: dict[str, object]) -> None:
    answer = answered(f"<tool_call>{written}</tool_call>")
    assert (answer.calls, answer.text) == ([("write", arguments)], "")


def test_broken_json_reaches_the_caller_as_it_was_written() -> None:
    answer = answered('<tool_call>{"name": "write", "arguments": {"a": 1 "b": 2}}</tool_call> Done.')
    assert (answer.arguments, answer.text) == (['{"a": 1 "b": 2}}'], " Done.")


def test_a_text_that_breaks_off_in_a_string_is_not_completed() -> None:
    """Half of a file that is to be written is not the file."""
    assert answered('<tool_call>{"name": "write", "arguments": {"text": "half').arguments == ['{"text": "half']


TYPED = "<function=list><parameter=path>12</parameter><parameter=depth>{}</parameter></function>"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<function=list><parameter=path>\nsrc\n<parameter=depth>\n2\n</function>", {"path": "src", "depth": 2}),
        (TYPED.format("2"), {"path": "12", "depth": 2}),
        (TYPED.format("True"), {"path": "12", "depth": True}),
        (TYPED.format("two"), {"path": "12", "depth": "two"}),
        ('[list("src", depth=2)]', {"path": "src", "depth": 2}),
        (r"[list(path='\d \\d \n')]", {"path": "\\d \\d \n"}),
        (
            '<tool_call>list<arg_key>pa"th</arg_key><arg_value>"\\\n</arg_value></tool_call>',
            {'pa"th': '"\\\n'},
        ),
    ],
    ids=["no end of a parameter", "number", "constant", "text", "positional", "backslashes", "key and value"],
)
def test_arguments_get_their_names_and_types_from_the_schema(text: str, arguments: dict[str, object]) -> None:
    assert answered(text).calls == [("list", arguments)]


@pytest.mark.parametrize("value", ["open('x')", "a.b", "1 + 1", "f'{x}'", "__import__('os')", "b'x'", "{1: 2}"])
def test_python_is_read_but_never_run(value: str) -> None:
    text = f"[list(path={value})]"
    answer = answered(text)
    assert (answer.text, answer.calls) == (text, [])


# ── tools as tags ──


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('<list path="src"/>', {"path": "src"}),
        ("<list path='src' depth='2' />", {"path": "src", "depth": 2}),
        ('<list path="src"></list>', {"path": "src"}),
        ("<list/>", {}),
        ("<list />", {}),
        ("<list></list>", {}),
        ('<list\n  path = "a\nb"\n  depth="2"\n/>', {"path": "a\nb", "depth": 2}),
        (
            '<list path="&lt;a &amp;&amp; &quot;b&quot;&gt; &apos;c&apos; &#10;&#x41;"/>',
            {"path": "<a && \"b\"> 'c' \nA"},
        ),
        ('<list path="?a=1&copy=2&b;"/>', {"path": "?a=1&copy=2&b;"}),
        ('<list path="&#xd800;&#0;&#x110000;&#9999999;"/>', {"path": "&#xd800;&#0;&#x110000;&#9999999;"}),
        ("<list path='say \"hi\" > /dev/null'/>", {"path": 'say "hi" > /dev/null'}),
        ('<list path="12" depth="12"/>', {"path": "12", "depth": 12}),
        ('<list depth="" path=""/>', {"depth": "", "path": ""}),
        (
            """<list deep='{"a": [1, null]}' all="true" not="False"/>""",
            {"deep": {"a": [1, None]}, "all": True, "not": False},
        ),
        ('<list deep="{&quot;a&quot;: 1.5}"/>', {"deep": {"a": 1.5}}),
    ],
)
@pytest.mark.parametrize("around", ["{}", "<tool_call>{}</tool_call>", "<tool_call>\n{}\n</tool_call>"])
def test_a_tag_with_the_name_of_a_tool_is_a_call(around: str, written: str, arguments: dict[str, object]) -> None:
    answer = answered(around.format(written))
    assert (answer.calls, answer.text) == ([("list", arguments)], "")


@pytest.mark.parametrize("around", ["{}", "<tool_call>{}</tool_call>"])
@pytest.mark.parametrize("between", ["", "\n", "\n\n  "])
def test_several_tags_are_several_calls(around: str, between: str) -> None:
    tags = between.join(['<list path="a"/>', '<write path="b"></write>', "<list path='c'/>"])
    answer = answered("I look.\n" + around.format(tags))
    assert answer.calls == [("list", {"path": "a"}), ("write", {"path": "b"}), ("list", {"path": "c"})]
    assert answer.text == "I look."


@pytest.mark.parametrize(
    "text",
    [
        '<lists path="a"/>',
        '<lis path="a"/>',
        '<other path="a"/> is no tool',
        '<tool_call><other path="a"/></tool_call>',
        '<list path="a">something</list>',
        '<list path="a"><write/',
        "<list path=a/>",
        "<list path/>",
        '<list "a"/>',
        '<list path="a" path="b"/>',
        '<list path="a',
        '<list path="a"',
        "<list>",
        "a <list b",
        '</list path="a"/>',
        '< list path="a"/>',
        '```xml\n<list path="a"/>\n```',
    ],
)
def test_any_other_tag_is_text(text: str) -> None:
    for pieces in (list(text), [text]):
        answer = read_text(VOCAB, pieces, tools=TOOLS)
        assert (answer.text, answer.calls) == (text, [])


def test_a_tag_is_a_call_only_where_there_is_the_tool() -> None:
    text = '<write path="a"/>'
    assert read_text(VOCAB, list(text), tools=TOOLS[1:]).text == text
    assert read_text(VOCAB, list(text), tools=TOOLS).text == ""


def test_a_tool_whose_name_begins_another_is_told_from_it() -> None:
    tools = (Tool("list"), Tool("list_files"), Tool("list.all"))
    text = "<list_files a='1'/><list a='2'/><list.all a='3'/>"
    answer = read_text(VOCAB, list(text), tools=tools)
    assert answer.calls == [("list_files", {"a": 1}), ("list", {"a": 2}), ("list.all", {"a": 3})]


@pytest.mark.parametrize("name", ["tool", "function", "invoke", "tools", "tool_call", "think"])
def test_the_markers_of_other_dialects_mean_what_they_meant(name: str) -> None:
    """Whatever a client calls its tools."""
    tools = (Tool(name), Tool("write"))
    for text in (
        '<tool_call>{"name": "write", "arguments": {"a": 1}}</tool_call>',
        '<invoke name="write"><parameter name="a">1</parameter></invoke>',
        '<function name="write"><param name="a">1</param></function>',
        '<tool name="write"><parameter name="a">1</parameter></tool>',
        '<tools>{"name": "write", "arguments": {"a": 1}}</tools>',
        "<think>hm</think>[write(a=1)]",
    ):
        assert read_text(VOCAB, list(text), tools=tools).calls == [("write", {"a": 1})]
    # Otherwise it would matter in which pieces a text comes.
    markers = [*STRAY_ENDS, *(dialect.start for dialect in (*MARKED_DIALECTS, *tag_dialects([name, "write"])))]
    assert [(one, other) for one, other in permutations(markers, 2) if one in other] == []


def test_a_tag_at_the_end_of_reasoning_that_was_not_ended_is_a_call() -> None:
    answer = read_text(VOCAB, list('Well.\n<list path="a"/>'), tools=TOOLS, reasoning=REASONING[0])
    assert answer.calls == [("list", {"path": "a"})]


# ── what is quoted is no call ──


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        'Use `<list path="a"/>` to look.',
        '```python\nprint("<tool_call>")\nlist(path="a")\nx = {"name": "write", "arguments": {}}\n```',
        '```json\n{"a": "<tool_call>none</tool_call> and so',
    ],
)
def test_code_is_text_whatever_it_contains(text: str, cut: bool) -> None:
    assert answered(text, cut=cut).text == read_text(VOCAB, [text], tools=TOOLS, cut=cut).text == text


def test_a_word_without_end_is_read_once() -> None:
    word, read = re.compile(r"\w*"), []

    class Counting:
        def match(self, text: str, at: int) -> re.Match[str] | None:
            found = word.match(text, at)
            assert found
            read.append(len(found[0]))
            return found

    tape = Tape(0)
    reading = tape.word(Counting())  # type: ignore[arg-type]
    for _ in range(1000):
        tape.text += "abcd"
        next(reading)
    tape.is_over = True
    with pytest.raises(StopIteration) as ended:
        next(reading)
    assert ended.value.value == "abcd" * 1000
    assert sum(read) == 4000


def test_tags_in_a_fence_behind_other_text_are_an_example() -> None:
    call = '<tool_call>{"name": "write", "arguments": {}}</tool_call>'
    example = f"Calls look like this:\n```xml\n{call}\n```\nAnd now one:"
    answer = answered(f"{example}\n{call}")
    assert (answer.text, answer.calls) == (example, [("write", {})])
    assert answered(f"```xml\n{call}\n```").calls == [("write", {})]


def test_endless_attempts_are_given_up() -> None:
    text = '<tool_call>{"a": ["' * 4000
    answer = read_text(VOCAB, [text], tools=TOOLS)
    assert (answer.text, answer.names) == (text, [])


# ── cut answers ──


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("[TOOL_CALLS]write[ARGS]", "write", ""),
        ('[TOOL_CALLS]write[ARGS]{"a": 1', "write", '{"a": 1'),
        ('[TOOL_CALLS]write[ARGS]{"a": tr', "write", '{"a": '),
        ("<tool_call><function=write><parameter=a>\nhalf of", "write", ""),
        ("<tool_call><function=list><parameter=path>src</parameter><parameter=de", "list", '{"path": "src"'),
        ("<tool_call>write<arg_key>a</arg_key><arg_value>half", "write", ""),
        ("<|python_tag|>write(a='half", "write", ""),
        ('<|tool_call>call:write{a:<|"|>half', "write", ""),
        ('<tool_call><list path="src" dep', "list", ""),
    ],
)
def test_a_cut_call_of_any_dialect_has_its_name_and_what_is_whole(text: str, name: str, arguments: str) -> None:
    answer = answered(text, cut=True)
    assert (answer.text, answer.names, answer.arguments) == ("", [name], [arguments])


# ── markers ──


@pytest.mark.parametrize(
    "marker",
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call|>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "<arg_key>", "</arg_value>"),
        *("<|START_ACTION|>", "<|tool_call_start|>", "<|tool_call>", '<|"|>', "<|channel|>", "<think>"),
        *(block.end for block in REASONING if block.end != "<|end|>"),
    ],
)
def test_markers_that_are_control_tokens_stay_visible(marker: str) -> None:
    vocab = TinyVocab((marker, "<|im_end|>"))
    assert hidden_tokens(vocab) == {vocab.specials["<|im_end|>"]}


def test_tokens_around_messages_are_visible_only_to_models_that_have_channels() -> None:
    for channels, hidden in ((("<|channel|>",), {"<|im_end|>"}), ((), {"<|end|>", "<|message|>", "<|im_end|>"})):
        vocab = TinyVocab((*channels, "<|end|>", "<|message|>", "<|im_end|>"))
        assert hidden_tokens(vocab) == {vocab.specials[text] for text in hidden}


def test_a_token_that_ends_the_answer_is_never_text() -> None:
    vocab = TinyVocab(("<|channel|>", "<|call|>"))
    assert vocab.specials["<|call|>"] in hidden_tokens(vocab)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "write", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        "[write(a='\\ud800')]",
        "[write(a=1e999)]",
        "[write(a='\\d+')]",
        "<function=write><parameter=a>NaN</parameter></function>",
    ],
)
def test_whatever_comes_out_can_be_sent(text: str) -> None:
    answer = answered(text)
    for part in (answer.text, *answer.arguments, *(name or "" for name in answer.names)):
        part.encode()
    for _, arguments in answer.calls:
        assert arguments["a"] not in (float("inf"), float("nan"))
