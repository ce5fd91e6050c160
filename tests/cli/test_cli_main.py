from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from emberkeep.cli.commands import default_of, help_for
from emberkeep.cli.main import app, main
from emberkeep.config.settings import kind_of
from emberkeep.errors import ModelNotFound
from emberkeep.library.emberkeep import Emberkeep
from helpers.commands import Commands
from helpers.scripted_backend import ScriptedBackend, answer

pytestmark = pytest.mark.usefixtures("data_dir")

run = Commands(app).run

SETTING_FLAGS = (
    "--model",
    "--host",
    "--port",
    "--data-dir",
    "--ctx",
    "--parallel",
    "--ram-budget",
    "--disk-budget",
    "--api-key",
    "--threads",
    "--gpu-layers",
    "--max-concurrent-per-user",
)


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["emberkeep", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_teaches_with_examples() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("serve", "chat", "models", "cache", "memory", "doctor", "config"):
        assert f"  {command} " in result.output
    assert "emberkeep models pull hf:owner/repo/file.gguf" in result.output


def test_every_flag_of_a_setting_tells_its_type_and_its_default() -> None:
    text = " ".join(run("serve", "--help").output.split())
    for flag in SETTING_FLAGS:
        key = flag.removeprefix("--").replace("-", "_")
        assert f"{flag} <{kind_of(key).type}> {help_for(key)} [default: {default_of(key)}]" in text
    assert "--port <int> Port to listen on; 0 takes any free one. [default: 8080]" in text
    assert "--disk-budget <size> Disk space for stored prompt state. [default: 20 GiB]" in text


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


def test_a_refusal_of_the_system_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(config: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/some/file")

    monkeypatch.setattr("emberkeep.cli.chat.install_model", refused)
    assert run_main(monkeypatch, "chat") == 1
    assert capsys.readouterr() == ("", "Cannot use /some/file: Permission denied.\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("buffering", ["", "1"])
def test_output_that_cannot_be_written_is_one_sentence(buffering: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = show_config(buffering, stdout=full)
    assert (done.returncode, done.stderr) == (1, "Cannot write the output: No space left on device.\n")


@pytest.mark.parametrize("buffering", ["", "1"])
def test_a_reader_that_went_away_is_no_trouble(buffering: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = show_config(buffering, stdout=pipe)
    assert (done.returncode, done.stderr) == (1, "")


def show_config(buffering: str, stdout: TextIO) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "emberkeep", "config", "show"],
        env={**os.environ, "PYTHONUNBUFFERED": buffering},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_interrupt_is_quiet_and_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("emberkeep.cli.chat.install_model", interrupted)
    assert run_main(monkeypatch, "chat", "hello") == 130
    assert capsys.readouterr() == ("", "")


def test_serve_refuses_a_model_that_is_not_here() -> None:
    result = run("serve", "--port", "0", "--model", "nothing-like-it")
    assert isinstance(result.exception, ModelNotFound)
    assert "nothing-like-it" in str(result.exception)


def test_config_show_tells_where_each_value_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "emberkeep.toml").write_text('port = 9000\napi_key = "canary"\nram_budget = "1GiB"\n')
    monkeypatch.setenv("EMBERKEEP_CONFIG", "emberkeep.toml")
    monkeypatch.setenv("EMBERKEEP_QUEUE", "3")
    lines = {line.split()[0]: line.split(None, 1)[1] for line in run("config", "show").output.splitlines()}
    assert lines["port"].split() == ["9000", "file", str(tmp_path / "emberkeep.toml")]
    assert lines["queue"].split() == ["3", "env", "EMBERKEEP_QUEUE"]
    assert lines["ram_budget"].startswith("1.0 GiB")
    assert lines["host"].split() == ["127.0.0.1", "default"]
    assert lines["api_key"].startswith("***")
    assert lines["ctx"].split() == ["auto", "default"]


def test_config_show_as_json(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"api_key": "canary", "allow": ["box"]}')
    output = run("config", "show", "--json", "--config", "other.json").output
    shown = json.loads(output)
    assert shown["allow"] == {"value": ["box"], "from": f"file {tmp_path / 'other.json'}"}
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
