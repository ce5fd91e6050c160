from __future__ import annotations

import io

import pytest

from emberkeep.cli import model_setup
from emberkeep.cli.model_setup import ProgressLine


def _report(reporter: ProgressLine) -> None:
    reporter.say("Fetching [x]")
    reporter.progress("Requantising", 0, None)
    reporter.progress("Downloading", 1 << 20, 2 << 20)
    reporter.progress("Downloading", 2 << 20, 2 << 20)
    reporter.progress("Checking", 2 << 20, 2 << 20)
    reporter.say("Done")
    reporter.close()


def test_a_log_gets_one_line_per_step() -> None:
    output = io.StringIO()
    _report(ProgressLine(output, is_changing=False))
    assert output.getvalue().splitlines() == ["Fetching [x]", "Requantising", "Downloading", "Checking", "Done"]


def test_a_terminal_gets_one_line_that_changes_and_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(model_setup, "monotonic", lambda: next(clock))
    output = io.StringIO()
    _report(ProgressLine(output, is_changing=True))
    frames = output.getvalue().split("\r\033[2K")
    assert frames == [
        "Fetching [x]\n",
        "Requantising ...",
        "Downloading   50% of 2.0 MiB",
        "Downloading  100% of 2.0 MiB, 1.0 MiB/s",
        "Checking  100% of 2.0 MiB",
        "Done\n",
    ]


def test_what_comes_too_fast_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_setup, "monotonic", lambda: 5.0)
    output = io.StringIO()
    line = ProgressLine(output, is_changing=True)
    for done in range(100):
        line.progress("Loading", done, 100)
    assert output.getvalue().count("Loading") == 1


@pytest.mark.parametrize("is_changing", [False, True])
def test_a_model_that_is_loaded_again_later_shows_nothing(is_changing: bool) -> None:
    output = io.StringIO()
    reporter = ProgressLine(output, is_changing=is_changing)
    reporter.progress("Loading", 1, 2)
    reporter.close()
    shown = output.getvalue()
    reporter.progress("Checking", 1, 2)
    reporter.progress("Loading", 1, 2)
    assert output.getvalue() == shown
