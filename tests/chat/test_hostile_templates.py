"""No template, whatever it does, stops or fills the process that serves."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from emberkeep.backend.base import ModelCard
from emberkeep.chat import template
from emberkeep.chat.sandbox import JinjaTemplate
from emberkeep.chat.template import ChatTemplate
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import ModelBroken, TemplateFailed
from emberkeep.runtime.local_model import assemble
from emberkeep.types.request import Message
from helpers.heartbeat import Heartbeat
from helpers.hostile_templates import OPENED, RENDERED, when_told

pytestmark = pytest.mark.slow

GO = [Message("user", "go")]
FINE = [Message("user", "hello")]

STALL_S = 0.1
MARGIN_S = 10.0
"""For a machine that is busy: what is not stopped takes minutes, or all memory."""
MEMORY = 96 << 20

QUICK = ("round", "test_eq", "list_of_letters", "much_text")


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than in earnest, so that there is time to try them all."""
    monkeypatch.setattr(template, "_GRACE_S", 0.2)


@contextmanager
def harmless(budget_s: float) -> Iterator[None]:
    """The block neither stalls this process, nor takes much longer than it may, nor fills its memory."""
    begin, before = time.monotonic(), _most_memory()
    with Heartbeat() as heart:
        yield
    assert heart.worst_s <= STALL_S
    assert time.monotonic() - begin < budget_s + MARGIN_S
    assert _most_memory() - before < MEMORY


def _most_memory() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def opened(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos="", eos="")


def check_rendered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, sentence = RENDERED[name]
    with harmless(2 * template.MAX_SECONDS):
        chat = opened(when_told(source))
        assert chat.render(FINE) == "fine"
        monkeypatch.setattr(template, "MAX_SECONDS", 0.3)
        with pytest.raises(TemplateFailed, match=sentence):
            chat.render(GO)
    assert chat.render(FINE) == "fine"


def test_in_this_process_a_hostile_step_would_stall_it() -> None:
    with Heartbeat() as heart, suppress(TemplateFailed):
        JinjaTemplate("{{ 5 | round(-2000000) }}").render({}, 0.1)
    assert heart.worst_s > STALL_S


@pytest.mark.usefixtures("little_time")
@pytest.mark.parametrize("name", QUICK)
def test_a_hostile_step_is_stopped_in_a_process_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_rendered(name, monkeypatch)


@pytest.mark.usefixtures("little_time")
@pytest.mark.parametrize("name", sorted(RENDERED.keys() - set(QUICK)))
def test_every_hostile_step_is_stopped_in_a_process_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_rendered(name, monkeypatch)


@pytest.mark.usefixtures("little_time")
@pytest.mark.parametrize("name", sorted(OPENED))
def test_a_template_that_is_hostile_at_once_is_refused(name: str) -> None:
    source, sentence = OPENED[name]
    with harmless(2 * template.MAX_SECONDS), pytest.raises(TemplateFailed, match=sentence):
        opened(source)


@pytest.mark.parametrize("letter", ["x", "é", "😀", "\\ud800", "a\\ud800"])
def test_as_much_text_as_is_allowed_is_quick(letter: str) -> None:
    with harmless(2 * template.MAX_SECONDS):
        chat = opened(when_told(f"{{{{ '{letter}' * 400000 }}}}"))
        assert len(chat.render(GO)) >= 400_000


@pytest.mark.usefixtures("little_time")
def test_a_model_with_a_hostile_template_is_not_opened(tmp_path: Path) -> None:
    with (
        harmless(2 * template.MAX_SECONDS),
        pytest.raises(ModelBroken, match=r"too long\. Choose another model file"),
    ):
        assemble(
            Config(data_dir=tmp_path), FakeEngine(), OPENED["at_once_round"][0], ModelCard("hostile", 0, 4096)
        )
