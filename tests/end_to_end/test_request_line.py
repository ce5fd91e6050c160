"""The way of a request stays short, and is the one that the architecture tells."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import request_line

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TO_THE_FIRST_FRAME = 67
TO_THE_DURABLE_CHUNK = 77
"""Files of the package that run: 67 and 77, of 25,000 lines in all, so no file of 450 lines could hold many more
of them. One more is one more that a reader has to open: is it worth that? On a busy machine the engine may be
further when the first frame is written."""


@pytest.fixture(scope="module")
def line(smollm2: Path) -> dict[str, list[str]]:
    command = [sys.executable, request_line.__file__, str(smollm2)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(ran.stdout)


def test_few_files_run_for_a_chat_completion(line: dict[str, list[str]]) -> None:
    assert len(line["to_the_first_frame"]) <= TO_THE_FIRST_FRAME, line["to_the_first_frame"]
    assert len(line["to_the_durable_chunk"]) <= TO_THE_DURABLE_CHUNK, line["to_the_durable_chunk"]


def test_the_files_of_the_architectures_line_run(line: dict[str, list[str]]) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    told = [
        name
        for row in re.findall(r"^\| \d+ \| (.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`(.*?)`", row)
    ]
    assert len(told) >= 15
    assert {name for name in told if not name.startswith("engine/hf/")} <= set(line["to_the_first_frame"])
    disk = page.partition("## How its state reaches the disk")[2].partition("**A crash in between**")[0]
    assert set(re.findall(r"`(kv/\w+\.py)`", disk)) <= set(line["to_the_durable_chunk"])
