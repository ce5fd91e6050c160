"""What models write: one JSON object per line in `corpus/`, with the run, issue, test or template it came from."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.chat.dialects.table import REASONING
from emberkeep.types.request import Tool
from helpers.byte_vocab import Answer, TinyVocab, read_text
from helpers.chance import examples

Output = dict[str, Any]

_FILES = sorted((Path(__file__).parent / "corpus").glob("*.jsonl"))
CORPUS: list[Output] = [json.loads(line) for file in _FILES for line in file.read_text("utf-8").splitlines()]
IDS = [f"{i}-{output['model']}" for i, output in enumerate(CORPUS)]

PLAIN = TinyVocab()
HARMONY = TinyVocab(
    ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
)


def answered(output: Output, pieces: list[str]) -> Answer:
    tools = [Tool(name, "", {"type": "object", "properties": schema}) for name, schema in output["tools"].items()]
    opened = next((block for block in REASONING if block.start == output.get("opened")), None)
    vocab = HARMONY if output.get("framed") else PLAIN
    return read_text(vocab, pieces, tools=tools, reasoning=opened)


def outcome(answer: Answer) -> tuple[str, str, list[str | None], list[str]]:
    return answer.text, answer.reasoning, answer.names, answer.arguments


def cut(text: str, places: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(borders)]


def test_the_corpus_is_large_and_says_where_it_came_from() -> None:
    assert len(CORPUS) >= 60
    assert all(output["source"] and output["model"] for output in CORPUS)


@pytest.mark.parametrize("output", CORPUS, ids=IDS)
def test_what_a_model_wrote_is_read(output: Output) -> None:
    answer = answered(output, [output["text"]])
    assert (answer.text, answer.reasoning) == (output.get("says", ""), output.get("thinks", ""))
    assert [list(call) for call in answer.calls] == output["calls"]


@pytest.mark.parametrize("output", CORPUS, ids=IDS)
def test_one_character_at_a_time_it_is_the_same(output: Output) -> None:
    text = output["text"]
    assert outcome(answered(output, list(text))) == outcome(answered(output, [text]))


@examples(150)
@given(st.sampled_from(CORPUS), st.lists(st.integers(0, 10_000), max_size=12))
def test_in_any_pieces_it_is_the_same(output: Output, places: list[int]) -> None:
    text = output["text"]
    assert outcome(answered(output, cut(text, places))) == outcome(answered(output, [text]))


@examples(60)
@given(st.sampled_from(CORPUS), st.integers(0, 10_000), st.lists(st.integers(0, 10_000), max_size=6))
def test_so_is_what_breaks_off_or_goes_wrong(output: Output, place: int, places: list[int]) -> None:
    text = output["text"]
    half = place % (len(text) + 1)
    for broken in (text[:half], text[half:], text[half:] + text[:half]):
        assert outcome(answered(output, cut(broken, places))) == outcome(answered(output, [broken]))
        assert outcome(answered(output, list(broken))) == outcome(answered(output, [broken]))


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "```",
        "json\n",
        "tool_code\n",
        "<tools>",
        "</tools>",
    ),
    *("<function=f>", "<parameter=k>", "</parameter>", "</function>", '<invoke name="f">', "</invoke>"),
    *("f", "(", ")", "k=", "'v'", "[", "]", "{", "}", '"', "\\", ":", ",", " ", "\n", "1", "é", "<", "|"),
    *('{"name": "f", ', '"arguments": ', '"parameters": ', '{"k": "v"}', "<arg_key>", "</arg_key>", "<arg_value>"),
    *("<f", "<f ", "<fg ", "/>", "></f>", 'k="v"', "k='", "&quot;", "&#x41;"),
    *("<|python_tag|>", "<think>", "</think>", " to=functions.f", "<|message|>", "<|tool_call>call:f{", '<|"|>'),
]


@examples(200)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join), st.lists(st.integers(0, 400), max_size=6))
def test_whatever_is_written_the_pieces_do_not_matter(text: str, places: list[int]) -> None:
    output = {"tools": {"f": {}}}
    whole = outcome(answered(output, [text]))
    assert outcome(answered(output, cut(text, places))) == whole
    assert outcome(answered(output, list(text))) == whole


_VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=12)
_KEYS = st.sampled_from(["text", "number", "flag", "list", "more"])
_TYPES = {"text": "string", "number": "number", "flag": "boolean", "list": "array"}
_BY_TYPE = {
    "text": _VALUES,
    "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "list": st.lists(_VALUES, max_size=3),
    "more": _VALUES.map(lambda text: f"x{text}"),
}
_ARGUMENTS = st.lists(_KEYS, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({k: _BY_TYPE[k] for k in keys})
)


def tag(arguments: dict[str, Any], quote: str, is_closed: bool) -> str:
    """A call as XML says that it is written."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    entities = {"&": "&amp;", "<": "&lt;", '"': "&quot;", "'": "&apos;"}
    escaped = {key: "".join(entities.get(char, char) for char in text) for key, text in texts.items()}
    attributes = "".join(f" {key}={quote}{text}{quote}" for key, text in escaped.items())
    return f"<f{attributes}></f>" if is_closed else f"<f{attributes}/>"


@examples(200)
@given(
    st.lists(_ARGUMENTS, min_size=1, max_size=3),
    st.sampled_from("\"'"),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 2000), max_size=8),
)
def test_a_tag_says_what_was_written_into_it(
    calls: list[dict[str, Any]], quote: str, is_closed: bool, is_wrapped: bool, places: list[int]
) -> None:
    tools = {"f": {key: {"type": kind} for key, kind in _TYPES.items()}}
    text = "\n".join(tag(arguments, quote, is_closed) for arguments in calls)
    text = f"<tool_call>\n{text}\n</tool_call>" if is_wrapped else text
    answer = answered({"tools": tools}, cut(text, places))
    assert (answer.calls, answer.text) == ([("f", arguments) for arguments in calls], "")
