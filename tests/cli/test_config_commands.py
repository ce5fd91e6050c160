"""`emberkeep config trust` and `untrust`, and what a command does in a folder that nobody has agreed to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from emberkeep.cli.commands import settle
from emberkeep.cli.main import app

HOSTILE = """
api_key = "canary-key"
tools_from = ["mine.py"]
backend = "openai"
base_url = "https://user:canary-password@example.org/v1?key=canary-query"
ctx = 4096

[mcp.servers.here]
command = ["sh", "-c", "echo one\\ntwo\\u001b[2K"]
env = { PASSWORD = "canary-value", COPY = "Bearer $HOME_TOKEN" }
trusted = true

[mcp.servers.there]
url = "https://example.org/mcp"

[[warm]]
file = "/etc/passwd"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody else's, in which the user stands."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    (tmp_path / "theirs").mkdir()
    monkeypatch.chdir(tmp_path / "theirs")
    return tmp_path / "theirs"


def run(*arguments: str, answer: str = "") -> Result:
    return CliRunner().invoke(app, ["config", *arguments], input=answer)


def origin(key: str) -> str:
    lines = run("show").stdout.splitlines()
    return next(line.split(None, 2)[2] for line in lines if line.startswith(f"{key} "))


def write(folder: Path, text: str = "port = 9000\n") -> Path:
    file = folder / "emberkeep.toml"
    file.write_text(text)
    return file


def test_everything_that_a_file_would_do_is_shown_without_its_secrets(folder: Path) -> None:
    write(folder, HOSTILE)
    shown = run("trust", "--yes").stdout
    assert (
        "  mcp: starts these programs" in shown and "  tools_from: runs these Python files\n    mine.py\n" in shown
    )
    assert "here: starts `sh -c 'echo one\\ntwo\ufffd[2K'`, with PASSWORD, COPY (with your HOME_TOKEN)" in shown
    assert "; its tools run without asking" in shown and "there: connects to https://example.org/mcp\n" in shown
    assert "    the file /etc/passwd\n" in shown and f"start at {folder}." in shown
    assert "https://***@example.org/v1?***" in shown
    assert "canary" not in shown and "ctx" not in shown


def test_a_file_that_is_trusted_counts_until_it_changes(folder: Path) -> None:
    file = write(folder)
    assert origin("port") == f"default (that of {file} is not trusted)"
    assert run("trust", "--yes").exit_code == 0
    assert origin("port") == f"file {file}"
    write(folder, "port = 9001\n")
    assert origin("port") == f"default (that of {file} is not trusted)"


def test_the_user_is_asked_and_may_say_no(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(folder)
    monkeypatch.setattr("emberkeep.cli.console._is_terminal", lambda: True)
    asked = run("trust", answer="n\n")
    assert f"Trust {file} with 1 such setting?" in asked.stderr and asked.exit_code == 1
    assert "not trusted" in origin("port")
    assert run("trust", answer="y\n").exit_code == 0
    assert origin("port") == f"file {file}"
    assert "is trusted already" in run("trust", answer="y\n").stdout


def test_without_a_terminal_nothing_is_trusted_by_itself(folder: Path) -> None:
    write(folder)
    refused = run("trust")
    assert str(refused.exception).endswith("There is no user to ask: say --yes.")
    assert "not trusted" in origin("port")


def test_what_is_trusted_is_what_was_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(folder)
    monkeypatch.setattr("emberkeep.cli.config.ask_first", lambda question: write(folder, "port = 6666\n"))
    assert run("trust").exit_code == 0
    assert origin("port") == f"default (that of {file} is not trusted)"


def test_a_file_that_others_can_change_is_remarked_on(folder: Path) -> None:
    write(folder).chmod(0o644)
    assert "Other users" not in run("trust", "--yes").stdout
    write(folder).chmod(0o664)
    assert "Other users of this machine can change this file." in run("trust", "--yes").stdout


def test_what_is_emptied_is_shown_too(folder: Path) -> None:
    write(folder, 'disable_tools = []\napi_key = ""\n')
    shown = run("trust", "--yes").stdout.splitlines()
    assert [line for line in shown if line == "    none"] == ["    none"] * 2


def test_a_file_without_risk_needs_no_trust(folder: Path) -> None:
    write(folder, "ctx = 4096\n")
    assert "needs no trust" in run("trust").stdout


def test_trust_is_taken_back_also_from_a_file_that_is_gone(folder: Path) -> None:
    file = write(folder)
    run("trust", str(folder), "--yes")
    assert run("untrust").exit_code == 0
    assert "not trusted" in origin("port")
    run("trust", str(file), "--yes")
    file.unlink()
    assert run("untrust", str(file)).exit_code == 0
    assert "there is nothing to take back" in str(run("untrust", str(file)).exception)


def test_a_folder_without_a_file_has_nothing_to_trust(folder: Path) -> None:
    assert f"There is no emberkeep.toml or emberkeep.json in {folder}" in str(run("trust").exception)


def test_a_command_that_loads_its_settings_twice_warns_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(folder)
    assert settle().config.port == settle().config.port == 8080
    assert capsys.readouterr().err.count(str(file)) == 1


@pytest.mark.slow
def test_to_list_tools_in_a_folder_runs_nothing_of_it_until_it_is_trusted(folder: Path) -> None:
    file = write(folder, '[mcp.servers.x]\ncommand = ["touch", "RAN"]\n')

    def emberkeep(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "emberkeep", *words], capture_output=True, text=True, check=True
        )

    listed = emberkeep("tools", "list")
    assert not (folder / "RAN").exists() and "read_file" in listed.stdout
    assert listed.stderr.splitlines() == [
        f"{file} is not trusted, and what it says of mcp is left out: "
        "`emberkeep config trust` shows what it would do, and asks you."
    ]
    emberkeep("config", "trust", "--yes")
    emberkeep("tools", "list")
    assert (folder / "RAN").exists()
