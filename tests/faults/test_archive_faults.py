"""An archive whose disk is full or read-only: the conversation goes on, and what left it is archived later."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from emberkeep.errors import MemoryFailed
from helpers.conversing import Answer, Client, Harbour, line
from helpers.remembering import turn

pytestmark = pytest.mark.slow

Break = Callable[[Harbour, bool], None]


def fill(harbour: Harbour, is_broken: bool) -> None:
    """SQLite is not given another page, and those that it has are full."""
    writer = harbour.memory._database._writer
    writer.pragma("max_page_count", writer.pragma("page_count") if is_broken else 1 << 20)
    with suppress(MemoryFailed):
        for number in range(1000 if is_broken else 0):
            harbour.memory.archive("another user", [turn(f"junk {number}")])


def make_read_only(harbour: Harbour, is_broken: bool) -> None:
    harbour.memory._database._writer.pragma("query_only", is_broken)


BREAKS = pytest.mark.parametrize(
    ("break_", "why"), [(fill, "its disk is full: make room"), (make_read_only, "allow writing there")]
)


@pytest.fixture
def harbour(tmp_path: Path) -> Iterator[Harbour]:
    with Harbour(tmp_path, recall="off") as harbour:
        yield harbour


def long_turns(client: Client, count: int, begin: int = 0) -> list[Answer]:
    """Long enough for the archive to need pages."""
    return [client.say(line(number, words=60)) for number in range(begin, begin + count)]


@BREAKS
def test_the_conversation_goes_on_and_says_why_it_is_not_archived(harbour, break_: Break, why):
    client = Client(harbour)
    break_(harbour, True)
    answers = long_turns(client, 8)
    evictions = [eviction for answer in answers for eviction in answer.evictions]
    failed = [eviction for eviction in evictions if not eviction.archived]
    assert failed
    assert all(why in eviction.error for eviction in failed)
    assert harbour.backend.stats()["sessions"]["archive_failures"] >= len(failed)
    assert f"[{evictions[-1].out} earlier messages" in answers[-1].prompt


@BREAKS
def test_what_left_is_out_on_the_next_turn_and_archived_once_there_is_room(harbour, break_: Break, why):
    client = Client(harbour)
    break_(harbour, True)
    out = long_turns(client, 8)[-1]
    again = client.say("Hm.")
    assert not again.evictions
    assert again.prompt.startswith(out.prompt)
    break_(harbour, False)
    client.say("Well.")
    gone = harbour.backend._sessions.view(client.request()).gone.spoken
    assert harbour.archived_texts() == [client.messages[i].content for i in sorted(gone)]
    client.say("Well?")
    assert harbour.archived_texts() == [client.messages[i].content for i in sorted(gone)]


def test_a_server_that_ends_before_there_is_room_begins_again_with_all_of_it(tmp_path):
    with Harbour(tmp_path, recall="off") as harbour:
        client = Client(harbour)
        make_read_only(harbour, True)
        long_turns(client, 8)
    with Harbour(tmp_path, recall="off") as harbour:
        later = Client(harbour)
        later.messages = client.messages
        answer = later.say("Where were we?")
        assert answer.evictions[0].archived
        assert len(harbour.archived_texts()) == answer.evictions[0].out


def test_without_a_memory_the_conversation_goes_on_and_the_model_is_told(tmp_path):
    with Harbour(tmp_path, memory=False) as harbour:
        client = Client(harbour)
        answer = client.talk_until_full()
        assert (answer.evictions[0].archived, answer.evictions[0].error) == (False, "")
        assert "they cannot be read any more" in answer.prompt
        again = client.say("Well?")
        assert again.prompt.startswith(answer.prompt)
        assert not again.evictions


def test_a_memory_that_cannot_be_opened_is_none(tmp_path):
    (tmp_path / "memory.sqlite3").write_bytes(
        b"this is no database, and it is long enough to be seen as none " * 20
    )
    with Harbour(tmp_path) as harbour:
        assert harbour.backend.memory is None
        assert Client(harbour).talk_until_full().evictions


ON_A_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from helpers.conversing import Client, Harbour, line

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Harbour(Path(sys.argv[1]), recall="off") as harbour:
    client = Client(harbour)
    size = sum(file.stat().st_size for file in Path(sys.argv[1]).glob("memory*"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    evictions = [e for i in range(10) for e in client.say(line(i, words=60)).evictions]
    assert any(e.error for e in evictions), evictions
    assert client.say("Hm.").completed.usage.prompt_tokens < 768
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    client.say("Well.")
    gone = harbour.backend._sessions.view(client.request()).gone.spoken
    assert harbour.archived_texts() == [client.messages[i].content for i in sorted(gone)]
"""


def test_the_same_where_files_cannot_grow(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path)],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
