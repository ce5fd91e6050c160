from __future__ import annotations

import io
import logging
import sys
import threading

import pytest

from emberkeep.logs import LINES, begin_logging, is_verbose, request_id

log = logging.getLogger("emberkeep.kv")


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def both_outputs(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """On one terminal. Called in a test: before it, pytest puts its own in their places."""
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return screen


def test_a_command_tells_what_went_wrong_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    begin_logging("auto")
    log.info("a move")
    log.warning("the disk is full")
    assert capsys.readouterr().err == "the disk is full\n"
    assert not is_verbose()


def test_a_server_also_tells_what_an_operator_wants_to_know(capsys: pytest.CaptureFixture[str]) -> None:
    begin_logging("auto", is_server=True)
    log.debug("a detail")
    log.info("a move")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" INFO a move")


def test_at_debug_lines_say_where_they_come_from_and_for_which_request(capsys: pytest.CaptureFixture[str]) -> None:
    begin_logging("debug")
    token = request_id.set("abc")
    log.debug("a detail")
    request_id.reset(token)
    logging.getLogger("openai").debug("what a user has said")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" DEBUG emberkeep.kv [abc] a detail")


def test_to_begin_again_writes_every_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    begin_logging("debug")
    begin_logging("warning", is_server=True)
    log.info("a move")
    log.warning("the disk is full")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" WARNING the disk is full")


def test_a_line_waits_until_an_answer_on_the_same_terminal_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = both_outputs(monkeypatch)
    begin_logging("debug")
    LINES.hold_back()
    screen.write("The Danube")
    log.warning("the disk is full")
    screen.write(" is long.\n")
    LINES.let_out()
    log.warning("and stays so")
    first, second, third = screen.getvalue().splitlines()
    assert first == "The Danube is long."
    assert second.endswith("the disk is full")
    assert third.endswith("and stays so")


def test_a_thread_can_log_while_lines_wait_and_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = both_outputs(monkeypatch)
    begin_logging("warning")
    LINES.hold_back()
    for _ in range(2):
        thread = threading.Thread(target=log.warning, args=("the disk is full",), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        LINES.let_out()
    assert screen.getvalue() == "the disk is full\n" * 2


def test_no_line_waits_where_the_answer_goes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = both_outputs(monkeypatch)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    begin_logging("warning")
    LINES.hold_back()
    log.warning("the disk is full")
    assert screen.getvalue() == "the disk is full\n"


def test_a_terminal_shows_remarks_dimmed_and_is_not_driven_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = both_outputs(monkeypatch)
    begin_logging("info")
    log.info("the tool \033[31mrm\033[0m ran")
    log.warning("the disk is full")
    remark, warning = screen.getvalue().splitlines()
    assert remark.startswith("\033[2m")
    assert remark.endswith("the tool [31mrm[0m ran\033[0m")
    assert "\033" not in warning
