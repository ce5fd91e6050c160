"""Programs that do not want to end: after a call nothing of them is left, which /proc proves."""

from __future__ import annotations

import asyncio
import json
import resource
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emberkeep.tools.command_tool import CommandTool, ProcessMark, ProcessTree
from emberkeep.tools.function import tools_of
from emberkeep.tools.toolbox import ToolBox, ToolLimits, ToolPolicy
from emberkeep.types.events import Caller
from emberkeep.types.request import ToolCall

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]

PYTHON = sys.executable


def living(token: str) -> list[str]:
    """Command lines of all processes that have the token in theirs and are not dead."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            line = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
        except OSError:
            continue
        if token.encode() in line:
            found.append(line.decode())
    return found


@pytest.fixture
def token() -> Iterator[str]:
    """In the command line of everything that a test starts."""
    token = f"{secrets.randbelow(10**9) + 10**9}"
    yield token
    assert living(token) == []


def run(root: Path, command: list[str], **how: Any) -> dict[str, Any]:
    return asyncio.run(CommandTool(root, 20).run_command(command, **how))


def in_python(program: str, token: str) -> list[str]:
    return [PYTHON, "-S", "-c", f"import os, subprocess, signal, time, sys\n{program}", token]


BACKGROUND = "sleep {token} & echo $!"
SETSID = "setsid sleep {token} & sleep 0.05; echo done"
NOHUP = "nohup setsid sh -c 'sleep {token}; true' >/dev/null 2>&1 </dev/null & sleep 0.05"
NO_ENVIRONMENT = "env -i setsid sleep {token} >/dev/null 2>&1 </dev/null & sleep 0.05"


@pytest.mark.parametrize("script", [BACKGROUND, SETSID, NOHUP, NO_ENVIRONMENT])
def test_what_a_program_leaves_running_ends_with_it(tmp_path: Path, token: str, script: str) -> None:
    assert run(tmp_path, ["sh", "-c", script.format(token=token)])["exit"] == 0


@pytest.mark.parametrize("script", [BACKGROUND, SETSID, NOHUP, NO_ENVIRONMENT])
def test_at_the_timeout_grandchildren_end_too(tmp_path: Path, token: str, script: str) -> None:
    ran = run(tmp_path, ["sh", "-c", f"{script.format(token=token)}; exec sleep {token}"], timeout_s=0.3)
    assert ran["signal"] == "SIGTERM"


def test_a_daemon_that_left_everything_behind_is_found(tmp_path: Path, token: str) -> None:
    """Forked twice, own session, other folder, no environment, no files."""
    daemon = f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        os.closerange(0, 256)
        os.execve("/bin/sleep", ["sleep", "{token}"], {{}})
    os._exit(0)
os.wait()
time.sleep(0.1)
"""
    assert run(tmp_path, in_python(daemon, token))["exit"] == 0


def test_who_does_not_listen_is_killed(tmp_path: Path, token: str) -> None:
    deaf = """
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
print("deaf", flush=True)
time.sleep(100)
"""
    ran = run(tmp_path, in_python(deaf, token), timeout_s=1)
    assert ran["signal"] == "SIGKILL"
    assert ran["stdout"] == "deaf\ndeaf\n"


def test_a_program_that_closes_its_output_and_lives_on_is_stopped(tmp_path: Path, token: str) -> None:
    ran = run(tmp_path, ["sh", "-c", f"exec >&- 2>&- <&-; exec sleep {token}"], timeout_s=0.3)
    assert ran["signal"] == "SIGTERM"


def test_a_stopped_program_is_ended(tmp_path: Path, token: str) -> None:
    ran = run(tmp_path, ["sh", "-c", f"kill -STOP $$; sleep {token}"], timeout_s=0.2, signal="KILL")
    assert ran["signal"] == "SIGKILL"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_without_end_is_stopped_and_takes_no_memory(tmp_path: Path, token: str, stream: str) -> None:
    ran = run(tmp_path, ["sh", "-c", f"exec yes {token}" + (" >&2" if stream == "stderr" else "")])
    assert ran["stopped"] == "it wrote more than 67,108,864 bytes"
    assert ran[stream].count(token) > 1000
    assert len(ran[stream]) < 70_000


def test_output_of_a_child_that_outlives_its_parent_is_no_reason_to_wait(tmp_path: Path, token: str) -> None:
    ran = run(tmp_path, ["sh", "-c", f"yes {token} & exit 4"])
    assert ran["exit"] == 4


CHAIN = """
# Each starts the next and ends: at most 30, one at a time.
import os, sys, time
for _ in range(30):
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(0.02)
time.sleep(100)
"""


def test_a_chain_of_processes_is_broken(tmp_path: Path, token: str) -> None:
    run(tmp_path, in_python(CHAIN, token))


def test_a_tree_of_processes_is_felled(tmp_path: Path, token: str) -> None:
    tree = """
for _ in range(4):  # 16 in all
    if os.fork() == 0:
        os.setsid()
print(os.getpid(), flush=True)
time.sleep(100)
"""
    ran = run(tmp_path, in_python(tree, token), timeout_s=1)
    assert len(ran["stdout"].split()) == 16


def test_cancelling_the_call_ends_the_program_before_it_returns(tmp_path: Path, token: str) -> None:
    async def cancelled() -> None:
        fifo = tmp_path / "begun"
        started = asyncio.create_task(
            CommandTool(tmp_path, 60).run_command(
                ["sh", "-c", f"setsid sleep {token} & touch {fifo}; sleep {token}"]
            )
        )
        while not fifo.exists():
            await asyncio.sleep(0)
        started.cancel()
        with pytest.raises(asyncio.CancelledError):
            await started
        assert living(token) == []

    asyncio.run(cancelled())


def test_the_toolbox_lets_a_command_end_by_itself_and_keeps_its_output(tmp_path: Path, token: str) -> None:
    box = ToolBox(tools_of(CommandTool(tmp_path, 1)), ToolPolicy(asks=True), limits=ToolLimits(timeout_s=1))
    call = ToolCall("1", "run_command", f'{{"command": ["sh", "-c", "echo begun; sleep {token}"]}}')
    outcome = asyncio.run(box.run(call, Caller()))
    ran = json.loads(outcome.text)
    assert (ran["stopped"], ran["stdout"]) == ("it took longer than 1 s", "begun\n")


def test_others_are_left_alone(tmp_path: Path, token: str) -> None:
    """Also those that run at the same time, and one of ours that began before."""
    bystander = subprocess.Popen(["sleep", token])
    try:

        async def several() -> list[dict[str, Any]]:
            tool = CommandTool(tmp_path, 20)
            quick = [tool.run_command(["sh", "-c", f"setsid sleep {token} & echo x"]) for _ in range(3)]
            return await asyncio.gather(tool.run_command(["sleep", "0.5"]), *quick)

        assert [ran["exit"] for ran in asyncio.run(several())] == [0, 0, 0, 0]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_the_word_in_the_environment_is_enough_where_the_limit_is_not_there(token: str) -> None:
    mark = ProcessMark()
    left = subprocess.Popen(["setsid", "sleep", token], env={"PATH": "/usr/bin:/bin", **mark.environment})
    threading.Thread(target=left.wait).start()  # or it stays in the table
    assert ProcessTree(left.pid, mark).kill()


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 1 << 40, 1 << 30])
def test_the_mark_is_a_limit_that_no_other_process_has(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    marks = {ProcessMark().blocks for _ in range(50)}
    assert len(marks) > 40
    assert all(blocks * 1024 > 0 and (limit < 0 or blocks * 1024 < limit) for blocks in marks)
