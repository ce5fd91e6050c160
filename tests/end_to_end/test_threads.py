"""One folder with other numbers of threads: all that is stored is used, and agrees with a fresh evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.llamacpp.threads import available_cores
from emberkeep.library.emberkeep import Emberkeep
from helpers.server_process import RULES, assistant, system, user

pytestmark = [pytest.mark.slow, pytest.mark.serial]

THREADS = [threads for threads in (1, 2, 4) if threads <= max(available_cores(), 2)]
"""More threads than cores wait for each other, seconds for each token."""
CLOSE = 0.05
"""Of the KL divergence: rounding gives about a tenth of it, and state of other tokens whole nats."""


def test_a_conversation_goes_on_with_any_number_of_threads(smollm2: Path, tmp_path: Path) -> None:
    messages, end = [system(RULES), user("Which ships wait at pier 7?")], 1
    for threads in THREADS:
        with Emberkeep.open(Config(model=str(smollm2), data_dir=tmp_path, ctx=2048, threads=threads)) as llm:
            answer = llm.chat(messages, temperature=0.0, max_tokens=8)
            assert answer.usage.cached_tokens >= end - 1
            end = answer.usage.prompt_tokens + answer.usage.completion_tokens
            report = llm.verify(messages, 4)
            assert report.reused_tokens == answer.usage.prompt_tokens - 1
            assert report.mean_kl is not None
            assert report.mean_kl < CLOSE
            messages += [assistant(answer.text), user("And after that?")]
