from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


def chat(data_dir: Path, message: str) -> tuple[str, int, int]:
    """Answer, reused tokens and prompt tokens of one `emberkeep chat` process."""
    command = [sys.executable, "-m", "emberkeep.cli.main", "chat", "--data-dir", str(data_dir)]
    done = subprocess.run(
        [*command, "--max-tokens", "8", "-t", "0"], input=message, capture_output=True, text=True, check=True
    )
    reused = re.search(r"reused (\d+)/(\d+) tokens", done.stderr)
    assert reused is not None
    return done.stdout, int(reused[1]), int(reused[2])


@pytest.mark.slow
def test_the_first_chat_pulls_the_model_and_the_next_process_reuses_the_prompt(tmp_path: Path) -> None:
    message = "Please name the largest ocean on this planet, in one word."
    first, nothing, _ = chat(tmp_path, message)
    again, reused, prompt = chat(tmp_path, message)
    assert nothing == 0
    assert reused == prompt - 1
    assert first == again != "\n"
