"""`Emberkeep.memory`: what a user told is found again, by that user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, InvalidField, MemoryFailed, MemoryOff
from emberkeep.files import write_lines
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.library.user_memory import UserMemory, open_memory
from emberkeep.memory.memory import Memory
from emberkeep.types.lineage import private_namespace
from emberkeep.types.memory import ToolUse, Turn
from emberkeep.types.request import Message, Recall
from helpers.scripted_backend import ScriptedBackend, answer

KEY = "sk-proj-Abcd1234Efgh5678Ijkl9012Mnop3456Qrst7890Uvwx"
HOSTILE = ['["ann", ""]', "ann\x00", "ann' OR 1=1 --", "../ann", "*", "ANN", "änn", " ann", "%", "_"]


def turn(text: str, conversation: str = "c1") -> Turn:
    return Turn(text.encode(), conversation, 1000.0, text, "I see.", (ToolUse("look", "{}", "seen"),))


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Memory]:
    memory = Memory(tmp_path / "memory.sqlite3", limit_bytes=1 << 30)
    yield memory
    memory.close()


@pytest.fixture
def memory(stored: Memory) -> UserMemory:
    return UserMemory(stored)


def archived(stored: Memory, text: str, user: str = "", namespace: str = "", conversation: str = "c1") -> None:
    stored.archive(private_namespace(user, namespace), [turn(text, conversation)])


def texts(memory: UserMemory, query: str, **whose: Any) -> list[str]:
    return [found.user_text for found in memory.search(query, **whose)]


# ── what it does ──


def test_a_loaded_model_has_the_memory_of_its_backend(stored: Memory) -> None:
    backend = ScriptedBackend(lambda request: answer("x"))
    backend.memory = stored
    with Emberkeep(backend) as llm:
        llm.memory.store_answer("What is the capital of France?", "Paris.")
        (found,) = llm.memory.search("capital of France", max_results=5)
    assert (found.user_text, found.assistant_text) == ("What is the capital of France?", "Paris.")
    assert 0 < found.score <= 1


def test_archived_turns_are_found_in_all_conversations_or_in_one(memory: UserMemory, stored: Memory) -> None:
    archived(stored, "the harbour is deep", conversation="sea")
    archived(stored, "the harbour is closed", conversation="news")
    assert sorted(texts(memory, "harbour")) == ["the harbour is closed", "the harbour is deep"]
    assert texts(memory, "harbour", conversation_id="sea") == ["the harbour is deep"]
    assert len(memory.search("harbour", max_results=1)) == 1


def test_facts_are_set_told_listed_and_deleted(memory: UserMemory) -> None:
    memory.set_fact("name/of the cat", "Tom")
    memory.set_fact("name/of the cat", "Kater Murr 🐈")
    fact = memory.fact("name/of the cat")
    assert fact is not None
    assert (fact.name, fact.value) == ("name/of the cat", "Kater Murr 🐈")
    assert memory.facts() == [fact]
    memory.set_fact("a dog", "Rex")
    assert [each.name for each in memory.facts()] == ["a dog", "name/of the cat"]
    assert [memory.delete_fact("name/of the cat"), memory.delete_fact("name/of the cat")] == [True, False]
    assert memory.fact("name/of the cat") is None


def test_conversations_are_saved_and_continued(memory: UserMemory) -> None:
    memory.save_messages("c1", [Message("user", "Hi"), Message("assistant", "Hello.")], model="tiny")
    memory.save_messages("c1", [Message("user", "Bye")], model="tiny")
    (listed,) = memory.conversations()
    assert (listed.id, listed.message_count, listed.messages) == ("c1", 3, ())
    saved = memory.conversation("c1")
    assert saved is not None
    assert [message.content for message in saved.messages] == ["Hi", "Hello.", "Bye"]
    memory.replace_messages("c1", [Message("user", "Anew")], model="tiny")
    replaced = memory.conversation("c1")
    assert replaced is not None
    assert [message.content for message in replaced.messages] == ["Anew"]
    assert memory.conversation("c2") is None


def test_a_conversation_is_forgotten_without_the_others(memory: UserMemory, stored: Memory) -> None:
    archived(stored, "tides of spring", conversation="c1")
    archived(stored, "tides of autumn", conversation="c2")
    memory.set_fact("moon", "full")
    assert memory.forget(user="", conversation_id="c1").turns == 1
    assert texts(memory, "tides") == ["tides of autumn"]
    assert memory.forget(user="").facts == 1
    assert (memory.search("tides"), memory.facts()) == ([], [])


def test_what_was_exported_can_be_imported_elsewhere(memory: UserMemory, stored: Memory, tmp_path: Path) -> None:
    archived(stored, "the lamp is green", user="ann")
    memory.set_fact("lamp", "grün", user="ann")
    memory.export_to(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").stat().st_mode & 0o777 == 0o600
    with open_memory(Config(data_dir=tmp_path / "elsewhere")) as other:
        assert other.import_from(tmp_path / "out.jsonl") >= 2
        assert texts(other, "lamp", user="ann") == ["the lamp is green"]
        assert [fact.value for fact in other.facts(user="ann")] == ["grün"]
        before = other.stats()
        other.import_(memory.export())
        assert other.stats()["turns"] == before["turns"]


def test_an_export_leaves_an_existing_file_alone(memory: UserMemory, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(EmberkeepError, match="exists already: give another name"):
        memory.export_to(taken)
    assert taken.read_text() == "mine"
    with pytest.raises(EmberkeepError, match="Cannot write"):
        memory.export_to(tmp_path / "no" / "folder")


def test_an_export_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"kind": "header"}
        raise MemoryFailed("The disk is gone: look for it.")

    with pytest.raises(MemoryFailed, match="The disk is gone"):
        write_lines(tmp_path / "out.jsonl", rows())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("written", [b"no json\n", b"[1]\n", b"\xff\n", b"[" * 100_000])
def test_a_file_that_was_not_exported_is_not_imported(memory: UserMemory, tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(written)
    with pytest.raises(EmberkeepError, match="give a file that was exported"):
        memory.import_from(path)
    with pytest.raises(EmberkeepError, match="Cannot read"):
        memory.import_from(tmp_path / "nowhere")


def test_it_is_the_same_without_a_model_and_after_a_restart(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path)
    with open_memory(config) as memory:
        memory.set_fact("colour", "blue", user="ann")
    with open_memory(config) as again, open_memory(config) as beside:
        assert [fact.value for fact in again.facts(user="ann")] == ["blue"]
        beside.set_fact("colour", "red", user="ann")
        assert [fact.value for fact in again.facts(user="ann")] == ["red"]
        assert again.stats()["facts"] == again.stats(user="ann")["facts"] == 1
    with pytest.raises(MemoryFailed):
        memory.facts()


def test_memory_that_is_switched_off_says_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(MemoryOff, match="set memory = true"), open_memory(Config(data_dir=tmp_path, memory=False)):
        pass
    assert not list(tmp_path.iterdir())
    with Emberkeep(ScriptedBackend(lambda request: answer("x"))) as llm, pytest.raises(MemoryOff):
        _ = llm.memory


# ── what it refuses ──


@pytest.mark.parametrize(
    ("method", "arguments", "field"),
    [
        ("search", {"query": ""}, "query"),
        ("search", {"query": "x" * 4097}, "query"),
        ("search", {"query": "half \ud800"}, "query"),
        ("search", {"query": "x", "max_results": 0}, "max_results"),
        ("search", {"query": "x", "max_results": 101}, "max_results"),
        ("search", {"query": "x", "user": "u" * 513}, "user"),
        ("search", {"query": "x", "user": None}, "user"),
        ("search", {"query": "x", "namespace": 5}, "namespace"),
        ("search", {"query": "x", "conversation_id": "c" * 513}, "conversation_id"),
        ("set_fact", {"name": "", "value": "x"}, "name"),
        ("set_fact", {"name": "n" * 257, "value": "x"}, "name"),
        ("set_fact", {"name": "n", "value": ""}, "value"),
        ("set_fact", {"name": "n", "value": 5}, "value"),
        ("set_fact", {"name": "n", "value": "v" * 65_537}, "value"),
        ("fact", {"name": ""}, "name"),
        ("delete_fact", {"name": ""}, "name"),
        ("store_answer", {"question": "", "answer": "x"}, "question"),
        ("store_answer", {"question": "x", "answer": ""}, "answer"),
        ("conversations", {"limit": 0}, "limit"),
        ("conversation", {"conversation_id": ""}, "conversation_id"),
        ("forget", {"user": "", "conversation_id": ""}, "conversation_id"),
        ("export", {"namespace": "n"}, "namespace"),
        ("stats", {"user": "u" * 513}, "user"),
    ],
)
def test_a_bad_argument_is_named(memory: UserMemory, method: str, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        getattr(memory, method)(**arguments)
    assert caught.value.param == field


def test_secrets_are_no_facts(memory: UserMemory) -> None:
    for name, value in (("key", KEY), (KEY, "key"), ("password", "hunter2-and-more")):
        with pytest.raises(InvalidField, match="memory does not keep secrets"):
            memory.set_fact(name, value)
    assert memory.facts() == []


# ── whose it is ──


@pytest.mark.parametrize(("user", "namespace"), [("", ""), ("ann", ""), ("ann", "salt"), ("", "salt")])
def test_what_one_user_has_told_no_other_user_sees(
    memory: UserMemory, stored: Memory, user: str, namespace: str
) -> None:
    mine = {"user": user, "namespace": namespace}
    archived(stored, "the treasure is buried", user, namespace)
    memory.store_answer("Where is the treasure?", "Here.", **mine)
    memory.set_fact("treasure", "gold", **mine)
    memory.save_messages("c1", [Message("user", "treasure")], model="tiny", **mine)
    others = [("", ""), ("bob", ""), ("ann", ""), ("ann", "salt"), ("", "salt"), ("ann", "SALT")]
    others += [(hostile, "") for hostile in HOSTILE] + [("", hostile) for hostile in HOSTILE]
    for other in [{"user": u, "namespace": n} for u, n in others if (u, n) != (user, namespace)]:
        assert memory.search("treasure", **other) == []
        assert memory.facts(**other) == []
        assert memory.fact("treasure", **other) is None
        assert not memory.delete_fact("treasure", **other)
        assert memory.conversations(**other) == []
        assert memory.conversation("c1", **other) is None
        assert "treasure" not in json.dumps(list(memory.export(**other)))
        memory.forget(**other)
        memory.forget(**other, conversation_id="c1")
    assert len(memory.search("treasure", **mine)) == 2
    assert memory.fact("treasure", **mine) is not None
    assert memory.conversation("c1", **mine) is not None


@pytest.mark.parametrize("user", HOSTILE)
def test_a_user_may_be_called_anything(memory: UserMemory, user: str) -> None:
    memory.set_fact("name", user.replace("\x00", ""), user=user)
    assert len(memory.facts(user=user)) == 1
    assert memory.forget(user=user).facts == 1
    assert memory.stats()["facts"] == 0


# ── requests ──


def test_a_call_says_whether_messages_may_leave_and_how_they_come_back() -> None:
    backend = ScriptedBackend(lambda request: answer("x"))
    with Emberkeep(backend) as llm:
        llm.chat("hi")
        llm.chat("hi", evict=False, recall="tool")
        with pytest.raises(InvalidField, match="recall: give 'off', 'tool' or 'auto'"):
            llm.chat("hi", recall="sometimes")
        with pytest.raises(InvalidField, match="evict: give true or false"):
            llm.chat("hi", evict="no")  # type: ignore[arg-type]
    assert [(request.evict, request.recall) for request in backend.requests] == [
        (None, None),
        (False, Recall.TOOL),
    ]
