from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from emberkeep.cli.main import app
from emberkeep.errors import RequestError
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.types.request import Message, Request
from helpers.scripted_backend import ScriptedBackend, answer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def chat(*arguments: str) -> None:
    app(["chat", *arguments], standalone_mode=False)


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedBackend:
    """A chat in which the user quits at once."""
    backend = ScriptedBackend(lambda request: answer("hello"))
    monkeypatch.setenv("EMBERKEEP_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("emberkeep.cli.chat.install_model", lambda config: None)
    monkeypatch.setattr("emberkeep.cli.chat.terminal_lines", lambda history: iter(()))
    monkeypatch.setattr(Emberkeep, "open", lambda config: Emberkeep(backend))
    monkeypatch.setattr(sys, "stdin", Terminal())
    return backend


def test_the_system_message_is_made_ready_while_its_author_types(backend: ScriptedBackend) -> None:
    chat("--system", "Be kind.")
    (prefix,) = backend.kept_warm
    assert prefix.messages == (Message("system", "Be kind."),)
    assert (prefix.execution.is_prefix, prefix.max_tokens, prefix.namespace) == (True, 0, "")
    assert backend.requests == []


def test_there_is_nothing_to_make_ready_without_one_and_without_tools(backend: ScriptedBackend) -> None:
    chat("--tools", "off")
    assert backend.kept_warm == []


def test_tools_are_made_ready_too(backend: ScriptedBackend) -> None:
    chat("--enable-tools", "read_file")
    (prefix,) = backend.kept_warm
    assert [tool.name for tool in prefix.tools] == ["read_file", "more_output"]


def test_nothing_is_made_ready_for_a_pipe_whose_first_line_is_here(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    chat("--system", "Be kind.")
    assert backend.kept_warm == []
    assert len(backend.requests) == 1


def test_what_cannot_be_made_ready_does_not_keep_the_user_from_chatting(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(prefixes: list[Request]) -> None:
        raise RequestError("no")

    monkeypatch.setattr(backend, "keep_warm", refused)
    chat("--system", "Be kind.")
    assert "no\n" not in capsys.readouterr().err
    assert backend.closed
