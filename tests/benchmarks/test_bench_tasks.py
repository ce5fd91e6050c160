from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.tasks import KINDS, Task, make_task, recorded_tasks
from emberkeep.errors import EmberkeepError

pytestmark = pytest.mark.slow


def prompt(task: Task) -> str:
    return str(task.body["prompt"])


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_are_equal_for_equal_seeds_only(kind: str) -> None:
    assert make_task(kind, 1) == make_task(kind, 1)
    assert len({repr(make_task(kind, seed)) for seed in range(5)}) == 5


@pytest.mark.parametrize("seed", range(20))
def test_an_edit_is_begun_with_the_new_name_and_in_the_middle_of_a_line(seed: int) -> None:
    text = prompt(make_task("code edit", seed))
    _, source, told, begun = re.split(r"```(?:python\n)?", text)
    old, new = re.findall(r"`(\w+)`", told)
    assert old in source
    assert source.replace(old, new).startswith(begun)
    assert len(begun) < len(source) / 2
    assert not begun.endswith("\n")


@pytest.mark.parametrize("seed", range(20))
def test_an_agent_replaces_the_lines_of_a_method_and_begins_with_the_next_one(seed: int) -> None:
    text = prompt(make_task("agent", seed))
    before, after = (_lines(window) for window in text.split("OBSERVATION:\n")[1:])
    (first, last), (next_first, _) = [tuple(map(int, found)) for found in re.findall(r"edit (\d+):(\d+)", text)]
    written = text.split(f"edit {first}:{last}\n")[1].split("\nend_of_edit")[0].splitlines()
    assert before[: first - 1] + written + before[last:] == after
    assert after[next_first - 1].startswith(text.splitlines()[-1])


def _lines(window: str) -> list[str]:
    return [line.split(":", 1)[1] for line in window.split("\n\nTHOUGHT")[0].splitlines()]


@pytest.mark.parametrize("seed", range(20))
def test_a_quotation_begins_like_the_passage_that_was_asked_for(seed: int) -> None:
    text = prompt(make_task("quotation", seed))
    found = re.search(r'Passage \[(\d)\] says: "(.+)$', text)
    assert found is not None
    assert f"[{found[1]}] {found[2]} " in text
    assert f"told about {found[2].split()[0]}?" in text


def test_a_schema_is_part_of_the_request() -> None:
    assert make_task("JSON schema", 0).body["response_format"]["type"] == "json_schema"


# ── recorded conversations ──


def write(file: Path, *messages: dict[str, object]) -> None:
    file.write_text(json.dumps({"messages": messages}))


def test_a_recorded_conversation_is_continued_at_its_last_answer(tmp_path: Path) -> None:
    call = {"function": {"name": "ls", "arguments": "{}"}}
    write(
        tmp_path / "a.json",
        {"role": "user", "content": "List."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a b"},
        {"role": "assistant", "content": "Two files."},
    )
    (task,) = recorded_tasks(tmp_path)
    assert prompt(task).endswith("### tool\na b\n\n### assistant\n")
    assert json.dumps(call["function"]) in prompt(task)
    assert "Two files." not in prompt(task)


def test_of_a_long_conversation_an_earlier_answer_is_continued(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "x" * 3000} for _ in range(5) for role in ("user", "assistant")]
    write(tmp_path / "a.json", *turns)
    (task,) = recorded_tasks(tmp_path)
    assert 5000 < len(prompt(task)) < 10_000


def test_a_folder_without_conversations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmberkeepError, match="choose another --data"):
        recorded_tasks(tmp_path)


def test_a_file_that_is_no_conversation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(EmberkeepError, match=r"a\.json is not a JSON object with `messages`"):
        recorded_tasks(tmp_path)
