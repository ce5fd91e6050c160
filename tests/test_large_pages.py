"""The engine's memory is in large pages where the system gives them to who asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from emberkeep.large_pages import asking, mode

REPORT = """
import json, os, sys
from emberkeep.large_pages import ask_for_large_pages
ask_for_large_pages()
memory = b"x" * (64 << 20)
rollup = open("/proc/self/smaps_rollup").read()
huge = int(rollup.partition("AnonHugePages:")[2].split()[0])
print(json.dumps([os.getpid(), sys.argv[1:], dict(os.environ), huge]))
"""


@pytest.mark.parametrize("said", ["", "glibc.malloc.check=1"])
def test_a_process_asks_once_where_asking_helps(said: str) -> None:
    variables = {"HOME": "/home/me", **({"GLIBC_TUNABLES": said} if said else {})}
    environment = asking(variables, "madvise")
    assert environment is not None
    assert environment["HOME"] == "/home/me"
    assert environment["GLIBC_TUNABLES"].split(":") == [*filter(None, [said]), "glibc.malloc.hugetlb=1"]
    assert asking(environment, "madvise") is None


@pytest.mark.parametrize("given", ["always", "never", None, ""])
def test_nothing_is_asked_where_it_makes_no_difference(given: str | None) -> None:
    assert asking({}, given) is None


def test_who_has_decided_otherwise_is_left_alone() -> None:
    assert asking({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "madvise") is None


@pytest.mark.skipif(mode() != "madvise", reason="this system gives large pages to everyone or to nobody")
@pytest.mark.parametrize("said", [None, "glibc.malloc.arena_max=3"])
def test_the_process_goes_on_as_itself_in_large_pages(tmp_path: Path, said: str | None) -> None:
    """With the same id, arguments and environment: whatever it starts knows nothing of it."""
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    environment = {**os.environ, **({"GLIBC_TUNABLES": said} if said else {})}
    process = subprocess.Popen(
        [sys.executable, script, "serve", "--port", "1"], env=environment, stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate()
    pid, arguments, variables, huge_kib = json.loads(out)
    assert (pid, arguments, variables) == (process.pid, ["serve", "--port", "1"], environment)
    assert huge_kib >= 32 << 10
