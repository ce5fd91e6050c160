"""`make torture`: which parts there are, and what it tells in the end."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import torture
from helpers.parts import TORTURE

REPORT = '<testsuites><testsuite tests="{}" failures="1" errors="0" skipped="2"/></testsuites>'


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run: 10 tests side by side, of which one fails, and none alone."""
    called: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command[0] == "git":
            return subprocess.CompletedProcess(command, 0, "abc1234\n")
        called.append(command)
        if "not serial" not in command:
            return subprocess.CompletedProcess(command, 5)
        report = next(word for word in command if word.startswith("--junitxml="))
        Path(report.partition("=")[2]).write_text(REPORT.format(10))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("EMBERKEEP_TEST_TORTURE", "3")
    return called


def test_without_a_part_all_of_them_run_and_are_told(
    commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert torture.main([]) == 1
    out = capsys.readouterr().out
    assert [command[4] for command in commands] == [part for part in TORTURE for _ in range(2)]
    rows = [line.split()[:4] for line in out.splitlines()]
    assert all([part, "10", "1", "2"] in rows for part in TORTURE)
    assert "| abc1234 |" in out and f"| all | 3 | {10 * len(TORTURE)} | {len(TORTURE)} |" in out


def test_one_part_gets_the_arguments_of_pytest(commands: list[list[str]]) -> None:
    torture.main(["faults", "--", "-x"])
    assert [command[4] for command in commands] == ["faults", "faults"]
    assert all(command[-1] == "-x" for command in commands)


def test_an_unknown_part_is_refused_with_those_there_are(
    commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert torture.main(["storms"]) == 2
    assert "There is no part storms: choose one of faults, browser" in capsys.readouterr().err
    assert commands == []
