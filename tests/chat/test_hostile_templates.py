"""No template, whatever it does, stops or fills the process that serves."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from emberkeep.backend.base import ModelCard
from emberkeep.chat import template
from emberkeep.chat.render_worker import JinjaTemplate
from emberkeep.chat.template import ChatTemplate
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import ModelBroken, TemplateFailed
from emberkeep.runtime.local_model import assemble
from emberkeep.types.request import Message
from helpers.hostile_templates import HOSTILE, STOPPED, when_told
from helpers.waiting import Heartbeat

pytestmark = pytest.mark.slow

GO = [Message("user", "go")]

STALL_S = 0.1
MARGIN_S = 10.0
"""Of a processor: processes have to start, and the system counts their whole seconds. What is not stopped takes
minutes, or all memory."""
MEMORY = 96 << 20


@contextmanager
def harmless(budget_s: float) -> Iterator[None]:
    """The block neither stalls this process, nor computes much longer elsewhere than it may, nor fills its memory.
    How long a machine that is busy lets it wait says nothing."""
    begin, before = _computed_elsewhere(), _most_memory()
    with Heartbeat() as heart:
        yield
    assert heart.worst_s <= STALL_S
    assert _computed_elsewhere() - begin < budget_s + MARGIN_S
    assert _most_memory() - before < MEMORY


def _computed_elsewhere() -> float:
    """Seconds of a processor that the processes took in which templates were rendered; all of them end now."""
    template._POOL.close()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _most_memory() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def opened(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos="", eos="")


def test_in_this_process_a_hostile_step_would_stall_it() -> None:
    with Heartbeat() as heart:
        JinjaTemplate("{% set x = 2000000 %}{{ 5 | round(-x) }}").render({})
    assert heart.worst_s > STALL_S


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_template_is_stopped_in_a_process_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_SECONDS", 0.3)
    with harmless(2 * template.MAX_SECONDS), pytest.raises(TemplateFailed, match=STOPPED):
        opened(HOSTILE[name]).render(GO)
    monkeypatch.undo()
    assert opened(when_told("")).render(GO) == "fine"


@pytest.mark.parametrize("letter", ["x", "é", "😀", "\\ud800", "a\\ud800"])
def test_as_much_text_as_is_allowed_is_quick(letter: str) -> None:
    with harmless(2 * template.MAX_SECONDS):
        chat = opened(when_told(f"{{% set n = 400000 %}}{{{{ '{letter}' * n }}}}"))
        assert len(chat.render(GO)) >= 400_000


def test_a_model_with_a_hostile_template_is_not_opened(tmp_path: Path) -> None:
    with (
        harmless(2 * template.MAX_SECONDS),
        pytest.raises(ModelBroken, match=r"too long\. Choose another model file"),
    ):
        assemble(Config(data_dir=tmp_path), FakeEngine(), HOSTILE["at_once_round"], ModelCard("hostile", 0, 4096))
