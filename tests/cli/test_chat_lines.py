from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from emberkeep.cli.chat import terminal_lines


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


def test_typed_lines_are_messages_until_ctrl_d(keys: PipeInput, tmp_path: Path) -> None:
    keys.send_text("one\rtwo\r\x04")
    assert list(terminal_lines(tmp_path / "history")) == ["one", "two"]


def test_ctrl_c_twice_quits_and_once_does_not(keys: PipeInput, tmp_path: Path) -> None:
    lines = terminal_lines(tmp_path / "history")
    keys.send_text("\x03")
    keys.send_text("one\r")
    assert next(lines) == "one"
    keys.send_text("\x03")
    keys.send_text("\x03")
    assert list(lines) == []


def test_a_pasted_text_with_line_breaks_is_one_message(keys: PipeInput, tmp_path: Path) -> None:
    keys.send_text("\x1b[200~one\ntwo\x1b[201~\r")
    assert next(terminal_lines(tmp_path / "history")) == "one\ntwo"


def test_alt_enter_begins_a_new_line(keys: PipeInput, tmp_path: Path) -> None:
    keys.send_text("one\x1b\rtwo\r")
    assert next(terminal_lines(tmp_path / "history")) == "one\ntwo"


def test_a_folder_that_cannot_be_written_means_no_history_and_no_error(keys: PipeInput, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    keys.send_text("one\rtwo\r\x04")
    assert list(terminal_lines(tmp_path / "file" / "history")) == ["one", "two"]


def test_history_is_kept_between_sessions_for_the_user_alone(keys: PipeInput, tmp_path: Path) -> None:
    history = tmp_path / "data" / "history"
    keys.send_text("remember me\r\x04")
    assert list(terminal_lines(history)) == ["remember me"]
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.parent.stat().st_mode & 0o777 == 0o700
    keys.send_text("\x1b[A\r\x04")
    assert list(terminal_lines(history)) == ["remember me"]
