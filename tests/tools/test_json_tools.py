"""JSON tools: what they find, and that nothing that a model writes takes long."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.tools.function import tools_of
from emberkeep.tools.json_tools import JsonTools
from emberkeep.types.request import Json
from helpers.chance import examples
from helpers.tool_calls import box_of, called, refused, told

TOOLS = tools_of(JsonTools())
SHIPS = json.dumps({"ships": [{"name": "Marigold", "metres": 12}, {"name": "Ida", "metres": 30}]})


def done(name: str, /, **arguments: Json) -> str:
    return asyncio.run(told(box_of(*TOOLS), name, **arguments))


def failed(name: str, /, **arguments: Json) -> str:
    return asyncio.run(refused(box_of(*TOOLS), name, **arguments))


def test_json_is_read() -> None:
    assert done("json_parse", text=' {"a": [1, 2.50, "é", null]} ') == '{"a":[1,2.5,"é",null]}'


def test_json_is_laid_out() -> None:
    assert done("json_pretty", text='{"b":1,"a":["é"]}') == '{\n  "b": 1,\n  "a": [\n    "é"\n  ]\n}'
    assert done("json_pretty", text='{"b":1,"a":2}', sort_keys=True) == '{\n  "a": 2,\n  "b": 1\n}'


def test_an_object_is_as_good_as_its_text() -> None:
    assert done("json_parse", text={"a": 1}) == '{"a":1}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": }', "line 1 column 7"),
        ("", "Expecting value"),
        ("[" * 99_999, "nested too deep"),
        ("[" * 200 + "]" * 200, "nested too deep"),
        ("9" * 5000, "not JSON"),
        (" " * (3 << 20), "give at most"),
    ],
)
def test_what_cannot_be_read_says_where_and_why(text: str, reason: str) -> None:
    assert reason in failed("json_parse", text=text)


@examples(50)
@given(st.text() | st.recursive(st.none() | st.floats(), st.lists).map(json.dumps))
def test_reading_anything_is_an_outcome(text: str) -> None:
    assert asyncio.run(called(box_of(*TOOLS), "json_pretty", text=text)).text


# ── in a process of their own ──


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("$.ships[*].name", '["Marigold","Ida"]'),
        ("$.ships[?@.metres > 20].name", '["Ida"]'),
        ("$..metres", "[12,30]"),
        ("$.planes", "[]"),
    ],
)
def test_a_path_finds_values(path: str, found: str) -> None:
    assert done("json_query", text=SHIPS, path=path) == found


def test_a_wrong_path_is_one_sentence() -> None:
    text = failed("json_query", text=SHIPS, path="$[[[")
    assert text.startswith("Error: It failed: ") and "\n" not in text


def test_a_path_that_fits_too_much_is_refused() -> None:
    assert "more than 1000 values" in failed("json_query", text=json.dumps(list(range(2000))), path="$[*]")


def test_a_schema_is_checked() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]}
    assert json.loads(done("json_validate", text='{"a": 1}', schema=schema)) == {
        "valid": False,
        "errors": [
            {"path": "$.a", "message": "1 is not of type 'string'"},
            {"path": "$", "message": "'b' is a required property"},
        ],
    }
    assert done("json_validate", text='{"b": 1}', schema=schema) == '{"valid":true}'


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "number of ships"}, "the schema is wrong at $.type"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "Unresolvable"),
        ({"$ref": "file:///etc/passwd"}, "Unresolvable"),
        ({"$ref": "#"}, "nested too deep"),
        ({"pattern": "("}, "the schema is wrong at $.pattern"),
    ],
)
def test_a_hopeless_schema_is_one_sentence(schema: Json, reason: str) -> None:
    assert reason in failed("json_validate", text='{"a": 1}', schema=schema)


def children() -> set[str]:
    return set(" ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at processes as Linux shows them")
def test_what_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkeep.tools.json_tools._WORK_S", 0.5)
    before = children()
    text = failed("json_validate", text=json.dumps("a" * 40 + "!"), schema={"pattern": "^(a+)+$"})
    assert text == "Error: It took longer than 0.5 s: use a simpler schema or path."
    assert children() <= before


def test_a_result_that_is_too_long_is_refused() -> None:
    again = ",".join("0" for _ in range(900))
    assert "characters fit" in failed("json_query", text=json.dumps(["x" * 1_000_000]), path=f"$[{again}]")
