"""However often a process is killed while it archives: what it said is archived is there, once, and is found."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import apsw
import pytest

from emberkeep.memory.memory import Memory
from helpers.chance import seed, times

KILLS = times(40)
SCRIPT = Path(__file__).with_name("remember_forever.py")


def start(path: Path, owner: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, str(SCRIPT), str(path), owner], stdout=subprocess.PIPE, env=env)


def live_and_die(path: Path, owners: Sequence[str], chance: random.Random) -> dict[str, int]:
    """All of them archive until each is killed, anywhere in the turn after its last word; the last turn of each
    that was acknowledged."""
    processes = {owner: start(path, owner) for owner in owners}
    last = {}
    for owner, process in processes.items():
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(chance.randrange(1, 6))]
        for _ in range(chance.randrange(50_000)):
            pass  # about a turn's time, so that the kill comes anywhere in it
        process.kill()
        lines += process.stdout.read().splitlines(keepends=True)
        process.wait()
        last[owner] = max(int(line) for line in lines if line.endswith(b"\n"))
    return last


def check(path: Path, last: dict[str, int]) -> None:
    memory = Memory(path, limit_bytes=1 << 40)
    for owner, newest in last.items():
        turns = [row for row in memory.export(owner) if row["kind"] == "turn"]
        keys = [int(row["key"], 16) for row in turns]
        assert keys == list(range(len(keys))) and len(keys) > newest
        assert len(keys) == memory.stats(owner)["turns"]
        assert len(memory.notes(owner, [key.to_bytes(16) for key in keys])) == len(keys)
        (found,) = memory.search(owner, f"item{newest}of{owner}")
        assert found.user_text.startswith(f"item{newest}of{owner} ")
    memory.close()
    db = apsw.Connection(str(path))
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.execute("INSERT INTO words (words) VALUES ('integrity-check')")
    indexed = db.execute("SELECT count(*) FROM words_docsize").fetchall()
    assert indexed == db.execute("SELECT count(*) FROM turns").fetchall()
    db.close()


@pytest.mark.slow
@pytest.mark.timeout(times(3600))
def test_every_acknowledged_turn_is_there_once_however_often_the_writers_are_killed(tmp_path: Path) -> None:
    chance = random.Random(seed(7))
    kills = 0
    while kills < KILLS:
        path = tmp_path / f"memory-{kills // 50}.sqlite"
        owners = ["anna"] if chance.random() < 0.5 else ["anna", "bert", "carl"]
        check(path, live_and_die(path, owners, chance))
        kills += len(owners)
