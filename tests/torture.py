"""`make torture`: parts of the tests one after another, and in the end a table of what became of each.

python tests/torture.py [part ...] [-- arguments of pytest]
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from helpers.parts import BENCH, TORTURE

ROOT = Path(__file__).parents[1]
_RUNS = (("-m", "not serial", "-n", "logical", "--dist", "worksteal"), ("-m", "serial"))
_NOTHING_TO_RUN = 5
_GiB = 1 << 30


@dataclass(frozen=True, slots=True)
class Outcome:
    part: str
    tests: int = 0
    failures: int = 0
    skipped: int = 0
    seconds: float = 0.0
    ended_well: bool = True
    """Also what pytest says of a run that broke before it could count."""


def main(arguments: Sequence[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parts, of_pytest = arguments[:at] or TORTURE, arguments[at + 1 :]
    unknown = [part for part in parts if part not in (*TORTURE, BENCH)]
    if unknown:
        print(f"There is no part {unknown[0]}: choose one of {', '.join(TORTURE)}.", file=sys.stderr)
        return 2
    outcomes = [run(part, of_pytest) for part in parts]
    print(*table(outcomes), sep="\n")
    print("", "For docs/torture.md:", record(outcomes), sep="\n")
    return 0 if all(outcome.ended_well for outcome in outcomes) else 1


def run(part: str, of_pytest: Sequence[str]) -> Outcome:
    """Blocks. First what may run side by side, then what has to run alone."""
    print(f"── {part} ──", flush=True)
    total = Outcome(part)
    with tempfile.TemporaryDirectory() as folder:
        for number, options in enumerate(_RUNS):
            total = _added(total, Path(folder) / f"{number}.xml", (*options, *of_pytest))
    return total


def _added(total: Outcome, report: Path, options: Sequence[str]) -> Outcome:
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "--part", total.part, f"--junitxml={report}", *options]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    counted = next(ElementTree.parse(report).iter("testsuite")).attrib if report.exists() else {}
    count = {name: int(counted.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return Outcome(
        part=total.part,
        tests=total.tests + count["tests"],
        failures=total.failures + count["failures"] + count["errors"],
        skipped=total.skipped + count["skipped"],
        seconds=total.seconds + time.monotonic() - begin,
        ended_well=total.ended_well and code in (0, _NOTHING_TO_RUN),
    )


def table(outcomes: Iterable[Outcome]) -> Iterable[str]:
    yield ""
    yield f"{'part':<12}{'tests':>7}{'failed':>8}{'skipped':>9}{'seconds':>9}"
    for each in outcomes:
        broken = "" if each.ended_well or each.failures else "  (pytest broke off)"
        yield f"{each.part:<12}{each.tests:>7}{each.failures:>8}{each.skipped:>9}{each.seconds:>9.0f}{broken}"


def record(outcomes: Sequence[Outcome]) -> str:
    """The row of this run for docs/torture.md."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GiB
    fields = (
        f"{date.today():%Y-%m-%d}",
        commit.stdout.strip() or "?",
        f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "all" if len(outcomes) == len(TORTURE) else ", ".join(outcome.part for outcome in outcomes),
        os.environ.get("EMBERKEEP_TEST_TORTURE", "1"),
        *(str(sum(getattr(each, name) for each in outcomes)) for name in ("tests", "failures", "skipped")),
        f"{sum(each.seconds for each in outcomes) / 60:.0f} min",
    )
    return f"| {' | '.join(fields)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
