"""Starting clients that use a server: what each is told, and that nothing of the user's own is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emberkeep.cli import launch, running_server
from emberkeep.cli.launch import CLIENTS, ClientTarget
from emberkeep.cli.main import app
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, ModelNotFound
from emberkeep.server.presence import announce
from helpers.scripted_server import ScriptedBackend, running

SERVICE = ClientTarget("http://127.0.0.1:8080", "mine", 32_768, "secret-key")


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_is_told_the_address_the_model_and_the_key(name: str, tmp_path: Path) -> None:
    setup = CLIENTS[name].set_up(SERVICE, tmp_path)
    told = " ".join([*setup.variables.values(), *setup.arguments, *setup.files.values()])
    assert all(words in told for words in (SERVICE.url, SERVICE.model, SERVICE.key))
    assert str(SERVICE.context) in told or name in ("qwen", "llm", "open-webui")  # which cannot be told
    for text in setup.files.values():
        json.loads(text)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The data folder of a server that runs, on a machine that may be busy."""
    monkeypatch.setattr(running_server, "_HEALTH_S", 60.0)
    with running(ScriptedBackend(), Config()) as server, announce(tmp_path, server.url):
        yield tmp_path


def run(*words: str, home: Path):
    return CliRunner().invoke(app, ["launch", "--data-dir", str(home), *words])


def test_print_shows_everything_and_starts_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("a client was started"))
    shown = run("claude", "--print", home=home).stdout
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:" in shown
    assert "export ANTHROPIC_MODEL=org/tiny" in shown
    assert shown.rstrip().endswith("claude")
    assert not (home / "clients").exists()


def test_the_key_is_named_and_not_shown(home: Path) -> None:
    shown = run("aider", "--print", "--api-key", "very-secret", home=home).stdout
    assert "very-secret" not in shown
    assert "$EMBERKEEP_API_KEY" in shown


def test_a_client_gets_its_variables_files_and_arguments(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(launch.shutil, "which", lambda program: f"/bin/{program}")
    monkeypatch.setattr(os, "execvpe", lambda *call: started.append(call))
    run("aider", "--", "--message", "hello", home=home)
    ((program, words, variables),) = started
    assert (program, words[0], words[-2:]) == ("/bin/aider", "aider", ["--message", "hello"])
    facts = home / "clients" / "aider" / "models.json"
    assert str(facts) in words
    assert json.loads(facts.read_text())["openai/org/tiny"]["max_input_tokens"] == 4096
    (sent,) = json.loads((home / "clients" / "aider" / "settings.json").read_text())
    assert sent["extra_params"] == {"max_tokens": 1024}
    assert variables["OPENAI_API_BASE"].endswith("/v1")
    assert variables["PATH"] == os.environ["PATH"]


def test_a_client_really_runs_in_our_place(home: Path, tmp_path: Path) -> None:
    """With a program of its name on the PATH."""
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(f'#!{sys.executable}\nimport os, sys\nprint(os.environ["ANTHROPIC_MODEL"], sys.argv[1:])\n')
    program.chmod(0o755)
    command = [sys.executable, "-m", "emberkeep", "launch", "claude", "--data-dir", str(home), "--", "-p", "hi"]
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "org/tiny ['-p', 'hi']\n", ran.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["emacs"], "There is no client 'emacs': choose from claude,"),
        (["aider", "-m", "nothing"], "The server has no model 'nothing': choose from org/tiny."),
    ],
)
def test_what_is_wrong_is_said(home: Path, words: list[str], sentence: str) -> None:
    error = run(*words, home=home).exception
    assert isinstance(error, EmberkeepError)
    assert sentence in str(error)


def test_a_client_that_is_not_installed_says_how_to_get_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.shutil, "which", lambda program: None)
    error = run("codex", home=home).exception
    assert str(error) == "Codex is not installed (codex): npm install -g @openai/codex."


def test_without_a_server_the_sentence_says_how_to_start_one(tmp_path: Path) -> None:
    assert "emberkeep serve" in str(run("claude", home=tmp_path).exception)


def test_a_context_that_is_too_short_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch._warn_of_small_context(CLIENTS["claude"], ClientTarget("", "tiny", 4096, ""))
    assert "16,000 tokens" in capsys.readouterr().err


def test_an_unknown_model_is_a_model_error(home: Path) -> None:
    assert isinstance(run("aider", "-m", "nothing", home=home).exception, ModelNotFound)
