"""What cannot fit into the context is refused by its size, before it is rendered or tokenized."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.chat.prompt import PromptBuilder
from emberkeep.errors import ContextExceeded
from helpers.conversing import Client, Harbour, ScriptedEngine

HUGE = "x" * 100_000


@pytest.fixture
def harbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harbour]:
    def draft(*_: object) -> None:
        pytest.fail("the text was tokenized")

    with Harbour(tmp_path, ScriptedEngine(context=1536)) as harbour:
        monkeypatch.setattr(PromptBuilder, "build", draft)
        yield harbour


@pytest.mark.parametrize("evict", [True, False])
def test_a_message_that_cannot_fit_is_refused_unread(harbour: Harbour, evict: bool) -> None:
    with pytest.raises(ContextExceeded, match="at least") as refusal:
        Client(harbour, evict=evict).say(HUGE)
    assert refusal.value.prompt_tokens > 1536
    assert not refusal.value.is_counted
