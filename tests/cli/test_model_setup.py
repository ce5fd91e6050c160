from __future__ import annotations

import io

import pytest
from rich.console import Console

from emberkeep.cli.model_setup import Bars, Lines

pytestmark = pytest.mark.slow


def _report(reporter: Bars | Lines) -> None:
    reporter.say("Fetching [x]")
    reporter.progress("Requantising", 0, None)
    reporter.progress("Downloading", 1 << 20, 2 << 20)
    reporter.progress("Downloading", 2 << 20, 2 << 20)
    reporter.progress("Checking", 2 << 20, 2 << 20)
    reporter.say("Done")
    reporter.close()


def test_a_log_gets_one_line_per_step() -> None:
    output = io.StringIO()
    _report(Lines(Console(file=output)))
    assert output.getvalue().splitlines() == ["Fetching [x]", "Requantising", "Downloading", "Checking", "Done"]


def test_a_terminal_gets_a_bar_per_step_that_ends_full() -> None:
    output = io.StringIO()
    _report(Bars(Console(file=output, force_terminal=True, width=100, color_system=None)))
    frames = output.getvalue()
    assert "Downloading" in frames and "Checking" in frames
    assert "2.0/2.0 MiB" in frames
    assert "iB/s" in frames
    assert frames.rstrip().endswith("Done")
