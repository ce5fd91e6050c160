from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from emberkeep import __version__
from emberkeep.cli.main import app, main
from emberkeep.errors import ModelNotFound
from emberkeep.library import Emberkeep
from support.scripted_backend import ScriptedBackend, answer


@pytest.fixture(autouse=True)
def clean_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of the person who runs the tests may change them."""
    for name in [name for name in os.environ if name.startswith("EMBERKEEP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("EMBERKEEP_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=input)


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["emberkeep", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_teaches_with_examples() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("serve", "chat", "models", "doctor", "config"):
        assert f"  {command} " in result.output
    assert "emberkeep models pull hf:owner/repo/file.gguf" in result.output


def test_help_loads_neither_engine_nor_web_framework() -> None:
    program = (
        "import sys; from emberkeep.cli.main import app; app(['--help'], standalone_mode=False);"
        "heavy = {'llama_cpp', 'numpy', 'apsw', 'fastapi', 'uvicorn', 'rich', 'prompt_toolkit', 'httpx'};"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("HEAVY []\n")


def test_version_is_printed() -> None:
    assert run("--version").output == f"emberkeep {__version__}\n"


def test_an_error_is_one_plain_sentence_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "serve", "--port", "many") == 1
    expected = "port = 'many' (flag --port) is not a whole number from 0 to 65535.\n"
    assert capsys.readouterr() == ("", expected)


def test_an_error_is_red_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run_main(monkeypatch, "serve", "--port", "many")
    assert capsys.readouterr().err.startswith("\033[31mport = ")


def test_wrong_usage_is_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "serve", "--prot", "1") == 2
    assert "--port" in capsys.readouterr().err


def test_an_interrupt_is_quiet_and_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("emberkeep.cli.main.install_model", interrupted)
    assert run_main(monkeypatch, "serve") == 130
    assert capsys.readouterr() == ("", "")


def test_serve_refuses_a_model_that_is_not_here() -> None:
    result = run("serve", "--model", "nothing-like-it")
    assert isinstance(result.exception, ModelNotFound)
    assert "nothing-like-it" in str(result.exception)


def test_config_show_tells_where_each_value_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "emberkeep.toml").write_text('port = 9000\napi_key = "canary"\nram_budget = "1GiB"\n')
    monkeypatch.setenv("EMBERKEEP_QUEUE", "3")
    lines = {line.split()[0]: line.split(None, 1)[1] for line in run("config", "show").output.splitlines()}
    assert lines["port"].split() == ["9000", "file", str(tmp_path / "emberkeep.toml")]
    assert lines["queue"].split() == ["3", "env", "EMBERKEEP_QUEUE"]
    assert lines["ram_budget"].startswith("1.0 GiB")
    assert lines["host"].split() == ["127.0.0.1", "default"]
    assert lines["api_key"].startswith("***")


def test_config_show_as_json(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"api_key": "canary", "allowed_hosts": ["box"]}')
    output = run("config", "show", "--json", "--config", "other.json").output
    shown = json.loads(output)
    assert shown["allowed_hosts"] == {"value": ["box"], "from": f"file {tmp_path / 'other.json'}"}
    assert shown["api_key"]["value"] == "***"
    assert "canary" not in output


def test_chat_answers_lines_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(lambda request: answer("hello there"))
    monkeypatch.setattr("emberkeep.cli.chat.install_model", lambda config: None)
    monkeypatch.setattr(Emberkeep, "open", lambda config: Emberkeep(backend))
    result = run("chat", "--system", "Be kind.", "--max-tokens", "5", "-t", "0", input="hi\n")
    assert result.exit_code == 0
    assert result.stdout == "hello there\n"
    assert result.stderr == "reused 0/10 tokens · first token 38 ms · 2 tokens at 200/s\n"
    request = backend.requests[0]
    assert [message.content for message in request.messages] == ["Be kind.", "hi"]
    assert (request.max_tokens, request.sampling.temperature) == (5, 0)
    assert backend.closed
