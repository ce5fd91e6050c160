from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers.commands import emberkeep

REUSED = re.compile(r"reused (\d+)/(\d+) tokens")


def chat(data_dir: Path, message: str) -> tuple[str, int, int]:
    """Answer, reused tokens and prompt tokens of one `emberkeep chat` process."""
    done = emberkeep(data_dir, "chat", "--max-tokens", "8", "-t", "0", said=message)
    reused = REUSED.search(done.stderr)
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


@pytest.mark.slow
def test_a_conversation_outgrows_its_context_and_goes_on_in_another_process(tmp_path: Path, smollm2: Path) -> None:
    small = ("--ctx", "512", "--max-tokens", "80", "-t", "0")
    about = ["lighthouses", "tides", "anchors", "knots", "whales"]
    lines = ["My boat is called Marigold.", *(f"Tell me something about {thing}." for thing in about)]
    full = emberkeep(tmp_path, "chat", str(smollm2), *small, said="\n".join(lines))
    assert "messages left the context (archived)" in full.stderr
    found = json.loads(emberkeep(tmp_path, "memory", "search", "my boat", "--json").stdout)
    assert found[0]["user_text"] == lines[0]

    later = emberkeep(tmp_path, "chat", "--continue", *small, said="What is the name of my boat?")
    reused = REUSED.search(later.stderr)
    assert reused is not None
    assert int(reused[1]) > int(reused[2]) / 2
    assert "recalled" in later.stderr
    assert f" {2 * len(lines) + 2} " in emberkeep(tmp_path, "chat", "--list").stdout
