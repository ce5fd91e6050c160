"""Processes that foreign templates run in: they answer only who asked, hold nothing of ours, and end with us."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from emberkeep.chat import template
from emberkeep.chat.render_worker import JinjaTemplate
from emberkeep.chat.template import MOST_WORKERS, ChatTemplate, ask_worker
from emberkeep.errors import Overloaded, TemplateFailed
from emberkeep.types.request import Message
from helpers.waiting import eventually

pytestmark = pytest.mark.slow

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def rendered(source: str, values: dict[str, Any], seconds: float = 20.0) -> str:
    return ask_worker("render", source, values, seconds)


def echo(text: Any) -> str:
    return rendered("{{ text }}", {"text": text})


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[template._Pool]:
    pool = template._Pool()
    monkeypatch.setattr(template, "_POOL", pool)
    yield pool
    pool.close()


def pids(pool: template._Pool) -> list[int]:
    return [worker._process.pid for worker in pool._workers]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ── the same text as here ──


class Mode(StrEnum):
    LOUD = "loud"
    QUIET = "quiet"


@pytest.mark.parametrize(
    "value",
    [
        "plain 😀 日本語 \x00 \ufdd0",
        "é" * 3_000_000,
        "a" + "😀" * 700_000,
        [1, 2.5, None, True, float("inf"), 2**200, {"a": [], "b": {"c": ()}}],
        [Mode.LOUD, Mode.QUIET],
    ],
    ids=["plain", "wide", "wider", "values", "subclasses"],
)
def test_values_and_texts_arrive_as_they_are(value: object) -> None:
    source = "{% for x in value %}{{ x }},{% endfor %}" if isinstance(value, list) else "{{ value }}"
    assert rendered(source, {"value": value}) == JinjaTemplate(source).render({"value": value})


def test_half_of_a_surrogate_pair_is_a_question_mark() -> None:
    assert echo("a\ud800\udcffb" * 90_000) == "a??b" * 90_000


def test_a_value_that_no_template_can_read_is_refused() -> None:
    with pytest.raises(TemplateFailed, match="cannot be given these values"):
        echo(object())
    assert echo("x") == "x"


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Pacific/Pago_Pago"])
def test_the_date_is_that_of_our_time_zone(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        now = rendered("{{ strftime_now('%Y-%m-%d %H:%M') }}", {})
        assert abs((datetime.now() - datetime.strptime(now, "%Y-%m-%d %H:%M")).total_seconds()) < 120
    finally:
        monkeypatch.undo()
        time.tzset()


def test_every_caller_gets_the_answer_to_its_own_question(pool: template._Pool) -> None:
    def ask(i: int) -> bool:
        text = f"{i} " * (1 + i * 37 % 400)
        return echo(text) == text

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(ask, range(400)))
    assert len(pids(pool)) <= MOST_WORKERS


# ── faults ──


def test_a_worker_that_was_killed_while_it_waited_is_replaced(pool: template._Pool) -> None:
    assert echo("a") == "a"
    [worker] = pool._workers
    worker._process.kill()
    worker._process.wait()
    assert echo("b") == "b"
    assert worker not in pool._workers


def test_a_worker_that_ran_out_of_memory_is_replaced(pool: template._Pool) -> None:
    if sys.platform == "darwin":
        pytest.skip("macOS does not count address space")
    assert echo("a") == "a"
    before = pids(pool)
    with pytest.raises(TemplateFailed, match="needs too much memory"):
        rendered("{% set n = 99000000 %}{{ ('ab' * n) | list | length }}", {})
    assert not pids(pool)
    assert echo("b") == "b"
    assert pids(pool) != before


def test_an_interrupted_question_leaves_no_answer_behind(
    pool: template._Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert echo("a") == "a"

    def interrupt(self: object, deadline: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(template._Worker, "_answer", interrupt)
        echo("another caller's")
    assert echo("b") == "b"


def test_no_descriptors_left_means_later_and_loses_nothing(
    pool: template._Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(template, "_start_process", fail)
        for _ in range(MOST_WORKERS + 1):
            with pytest.raises(Overloaded, match="Too many open files"):
                echo("a")
    assert echo("b") == "b"


@pytest.mark.usefixtures("pool")
def test_a_program_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_PROGRAM", "raise SystemExit(1)")
    with pytest.raises(Overloaded, match="does not start"):
        echo("a")


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize(
    "says",
    [
        b"\x02" + (1 << 27).to_bytes(8, "little") + b"x",
        b"\xff" * 9,
        b"\x01" + (1 << 60).to_bytes(8, "little"),
        b"\x01" + (2).to_bytes(8, "little") + b"\xff\xff",
        b"\x01" + (9).to_bytes(8, "little") + b"cut",
    ],
    ids=["short", "no kind", "endless", "no UTF-8", "cut"],
)
def test_a_worker_that_was_taken_over_can_only_fail(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hello = bytes([1]) + bytes(8)
    program = f"import os; os.write(0, {hello!r}); os.read(0, 1); os.write(0, {says!r})"
    monkeypatch.setattr(template, "_PROGRAM", program)
    with pytest.raises(TemplateFailed, match="was stopped"):
        echo("a")


@pytest.mark.usefixtures("pool")
def test_other_templates_are_rendered_while_one_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTemplate(
        "{% set x = 40000000 %}{% if messages[0].content == 'go' %}{{ 5 | round(-x) }}{% endif %}ok",
        bos="",
        eos="",
    )
    assert chat.render([Message("user", "hi")]) == "ok"
    monkeypatch.setattr(template, "MAX_SECONDS", 600.0)
    with ThreadPoolExecutor(1) as threads:
        stuck = threads.submit(chat.render, [Message("user", "go")])
        for i in range(5):
            assert echo(str(i)) == str(i)
        assert not stuck.done()
        while not stuck.done():
            for worker in list(template._POOL._workers):
                worker._process.kill()
            wait([stuck], timeout=0.05)
    assert isinstance(stuck.exception(), TemplateFailed)


# ── what it inherits, and when it ends ──


@ON_LINUX
def test_a_worker_has_no_file_socket_or_secret_of_ours(
    pool: template._Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EMBERKEEP_API_KEY", "canary-7f3a")
    with socket.socket() as ours, (tmp_path / "file").open("w") as file:
        ours.set_inheritable(True)
        os.set_inheritable(file.fileno(), True)
        assert echo("a") == "a"
        [pid] = pids(pool)
        inside = Path(f"/proc/{pid}")
        assert b"canary" not in (inside / "environ").read_bytes()
        held = sorted(str(link.readlink()) for link in (inside / "fd").iterdir())
        assert held[:2] == ["/dev/null", "/dev/null"]
        assert len(held) == 3
        assert held[2].startswith("socket:")
        assert (inside / "cwd").readlink() == Path("/")
        assert os.getsid(pid) != os.getsid(0)


@ON_LINUX
def test_a_worker_has_limits_of_its_own(pool: template._Pool) -> None:
    assert echo("a") == "a"
    [pid] = pids(pool)
    limits = Path(f"/proc/{pid}/limits").read_text()
    soft = {line[:25].strip(): line[25:].split()[0] for line in limits.splitlines()[1:]}
    assert int(soft["Max address space"]) < 1 << 30
    assert int(soft["Max cpu time"]) < 30
    assert soft["Max file size"] == soft["Max core file size"] == "0"


PARENT = """
import sys, threading
from emberkeep.chat import template
template.ask_worker("render", "{{ 1 }}", {}, 2.0)
[worker] = template._POOL._workers
if sys.argv[1] == "busy":
    stuck = ("render", "{{ 5 | round(-40000000) }}", {}, 2.0)
    threading.Thread(target=template.ask_worker, args=stuck).start()
    while worker in template._POOL._free.queue:
        pass
print(worker._process.pid, flush=True)
if sys.argv[1] == "exits":
    sys.exit()
sys.stdin.read()
"""


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


@pytest.mark.parametrize("how", ["idle", "exits", "busy"])
def test_a_worker_ends_with_who_started_it(how: str) -> None:
    with started(PARENT, how) as parent:
        assert parent.stdout and parent.stderr
        pid = int(parent.stdout.readline())
        if how != "exits":
            parent.kill()
        parent.wait()
        # What others have started is not ours to wait for.
        assert eventually(lambda: not is_running(pid), within_s=30.0)
        assert parent.stderr.read() == ""


FORKED = """
import os
from emberkeep.chat import template
echo = lambda text: template.ask_worker("render", "{{ text }}", {"text": text}, 2.0)
echo("a")
pid = lambda: next(iter(template._POOL._workers))._process.pid
before = pid()
if child := os.fork():
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert echo("c") == "c"
    assert pid() == before
    print("good")
else:
    assert not template._POOL._workers
    assert echo("b") == "b"
    assert pid() != before
"""


def test_two_processes_never_share_a_worker() -> None:
    with started(FORKED) as parent:
        said, errors = parent.communicate()
    assert (said, errors) == ("good\n", "")
