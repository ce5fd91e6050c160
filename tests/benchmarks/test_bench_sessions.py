from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recorded_sessions import Session, read_sessions
from emberkeep.errors import EmberkeepError

PEOPLE = [
    {"from": "system", "value": "S"},
    {"from": "human", "value": "one"},
    {"from": "gpt", "value": "1"},
    {"from": "human", "value": "two"},
]
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {}}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "result", "tool_call_id": "1"},
    {"role": "assistant", "content": "done"},
]


def read(tmp_path: Path, text: str) -> list[Session]:
    file = tmp_path / "talk.json"
    file.write_text(text)
    return read_sessions(file)


def test_conversations_of_people_are_read(tmp_path: Path) -> None:
    (session,) = read(tmp_path, json.dumps([{"id": "a", "conversations": PEOPLE}]))
    assert session == Session("a", "S", ("one", "two"), (), ("1",))


def test_calls_and_results_of_tools_are_text(tmp_path: Path) -> None:
    (session,) = read(tmp_path, json.dumps({"messages": MESSAGES}))
    assert session.told == ("one", "result")
    assert session.answers == ('{"name": "f", "arguments": "{}"}', "done")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([MESSAGES, {"conversations": PEOPLE}]),
        json.dumps({"messages": MESSAGES}) + "\n" + json.dumps({"conversations": PEOPLE}) + "\n",
        json.dumps([{"messages": MESSAGES}, {"conversations": PEOPLE}, {"conversations": [PEOPLE[0]]}]),
    ],
)
def test_a_file_may_hold_several_in_several_forms(tmp_path: Path, text: str) -> None:
    first, second = read(tmp_path, text)
    assert (first.name, first.told) == ("talk 1", ("one", "result"))
    assert (second.name, second.told) == ("talk 2", ("one", "two"))


def test_a_list_of_messages_is_one_conversation(tmp_path: Path) -> None:
    (session,) = read(tmp_path, json.dumps(MESSAGES))
    assert (session.name, session.told) == ("talk", ("one", "result"))


@pytest.mark.parametrize("content", ["", "[]", "[1]", "{}", '{"conversations": []}', '{"conversations": [{}]}'])
def test_a_file_without_conversations_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(EmberkeepError, match="give"):
        read(tmp_path, content)
