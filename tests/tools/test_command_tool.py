from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from emberkeep.errors import ToolFailed
from emberkeep.signals import Leaving
from emberkeep.tools.command_tool import CommandTool
from emberkeep.tools.function import tools_of, within
from emberkeep.types.events import Caller


def run(root: Path, command: str | list[str], limit: float = 20, **how: Any) -> dict[str, Any]:
    return asyncio.run(CommandTool(root, limit).run_command(command, **how))


def test_it_is_dangerous_and_runs_alone(tmp_path: Path) -> None:
    (function,) = tools_of(CommandTool(tmp_path, 60))
    assert function.is_dangerous and not function.runs_beside


def test_status_output_and_time_are_told(tmp_path: Path) -> None:
    ran = run(tmp_path, ["sh", "-c", "echo out; echo err >&2; exit 3"])
    seconds = ran.pop("seconds")
    assert ran == {"exit": 3, "stdout": "out\n", "stderr": "err\n"}
    assert 0 <= seconds < 20


def test_a_string_is_split_into_words_and_given_to_no_shell(tmp_path: Path) -> None:
    assert run(tmp_path, "echo 'two words' $HOME *")["stdout"] == "two words $HOME *\n"


def test_arguments_arrive_as_they_are(tmp_path: Path) -> None:
    words = ["", "a b", "$(id)", "`id`", "; rm", "\n", "-n", "'", '"', "ü"]
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    assert json.loads(run(tmp_path, [sys.executable, "-c", program, *words])["stdout"]) == words


@pytest.mark.parametrize("command", ["ls | wc", "a && b", "echo x > y", "sleep 9 &"])
def test_shell_syntax_is_not_taken_for_arguments(tmp_path: Path, command: str) -> None:
    with pytest.raises(ToolFailed, match="There is no shell"):
        run(tmp_path, command)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "empty"),
        ([], "empty"),
        ([""], "empty"),
        ("'open", "split into words"),
        (["a\0b"], "NUL"),
        (["echo", "\ud800"], "not Unicode"),
        ("no-such-program-anywhere", "no program"),
        ("./missing", "no program"),
        ("folder", "no program"),
        (["echo", *(["x" * 100_000] * 30)], "cannot be started"),
    ],
    ids=range(10),
)
def test_what_cannot_be_started_is_said(tmp_path: Path, command: str | list[str], said: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ToolFailed, match=said):
        run(tmp_path, command)


def test_it_runs_in_the_root_or_in_a_folder_of_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "out").symlink_to("/")
    assert run(tmp_path, "pwd")["stdout"] == f"{tmp_path.resolve()}\n"
    assert run(tmp_path, "pwd", cwd="deep")["stdout"] == f"{tmp_path.resolve()}/deep\n"
    for place in ["..", "/", "out", "missing"]:
        with pytest.raises(ToolFailed):
            run(tmp_path, "pwd", cwd=place)


def test_a_program_in_the_folder_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "hello").write_text("#!/bin/sh\necho hello\n")
    (tmp_path / "hello").chmod(0o755)
    assert run(tmp_path, "./hello")["stdout"] == "hello\n"


def test_it_reads_what_it_is_given(tmp_path: Path) -> None:
    text = "ü" * 200_000
    assert run(tmp_path, "wc -c", stdin=text)["stdout"].strip() == "400000"
    assert run(tmp_path, "cat")["stdout"] == ""


def test_a_program_that_does_not_want_its_input_is_fine(tmp_path: Path) -> None:
    assert run(tmp_path, "true", stdin="x" * 1_000_000)["exit"] == 0


def test_the_environment_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("OPENAI_API_KEY", "GITHUB_TOKEN", "EMBERKEEP_API_KEY", "SSH_AUTH_SOCK", "DATABASE_URL")
    for name in (*secrets, "LD_PRELOAD_"):
        monkeypatch.setenv(name, "canary")
    seen = run(tmp_path, "env")["stdout"]
    names = {line.partition("=")[0] for line in seen.splitlines()}
    assert "canary" not in seen
    assert {"PATH", "TERM"} <= names
    of_the_shell = {"PWD", "OLDPWD", "SHLVL", "_"}
    known = {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "TERM", "EMBER_COMMAND"}
    assert names - of_the_shell <= known


def test_of_long_output_both_ends_are_kept(tmp_path: Path) -> None:
    ran = run(tmp_path, ["seq", "1", "200000"])
    assert ran["exit"] == 0
    assert ran["stdout"].startswith("1\n2\n")
    assert ran["stdout"].endswith("199999\n200000\n")
    assert "bytes left out]" in ran["stdout"]
    assert len(ran["stdout"]) < 70_000


def test_binary_output_is_only_said(tmp_path: Path) -> None:
    assert run(tmp_path, ["head", "-c", "1000", "/dev/zero"])["stdout"] == "[binary, 1,000 bytes: not shown]"


def test_a_program_that_takes_too_long_is_stopped_and_what_it_wrote_is_kept(tmp_path: Path) -> None:
    ran = run(tmp_path, ["sh", "-c", "echo begun; exec sleep 60"], timeout_s=0.8)
    assert ran["stopped"] == "it took longer than 0.8 s"
    assert ran["signal"] == "SIGTERM"
    assert ran["stdout"] == "begun\n"


def test_no_call_gets_more_time_than_the_tool_has(tmp_path: Path) -> None:
    assert run(tmp_path, "sleep 60", limit=0.2, timeout_s=50)["stopped"] == "it took longer than 0.2 s"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["INT", "HUP", "TERM"])
def test_the_signal_that_stops_it_can_be_chosen_and_answered(tmp_path: Path, name: str) -> None:
    script = f"trap 'echo got it; exit 7' {name}; echo ready; while :; do sleep 0.01; done"
    ran = run(tmp_path, ["sh", "-c", script], timeout_s=1, signal=name)
    assert ran["exit"] == 7
    assert ran["stdout"] == "ready\ngot it\n"


def test_kill_leaves_no_time_to_answer(tmp_path: Path) -> None:
    ran = run(tmp_path, ["sh", "-c", "trap '' TERM; sleep 60"], timeout_s=0.2, signal="KILL")
    assert ran["signal"] == "SIGKILL"


def test_the_signal_that_ended_it_is_named(tmp_path: Path) -> None:
    assert run(tmp_path, ["sh", "-c", "kill -ABRT $$"])["signal"] == "SIGABRT"


@pytest.mark.parametrize("error", [Leaving(143), KeyboardInterrupt()], ids=repr)
def test_a_signal_that_comes_while_it_is_started_ends_it(tmp_path: Path, error: BaseException) -> None:
    class Interrupted(ThreadPoolExecutor):
        def submit(self, *work, **how):
            super().submit(*work, **how)
            raise error

    commands = CommandTool(tmp_path, 600)
    commands._threads = Interrupted(1)
    (function,) = tools_of(commands)

    async def story() -> None:
        await within(600, function.run({"command": ["sleep", "600"]}, Caller()))

    with pytest.raises(type(error)):
        asyncio.run(story())
    commands._threads.shutdown()  # waits for what runs
