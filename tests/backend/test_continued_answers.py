"""An answer that goes on where the client's last message ends, and how many tokens a chat has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.backend.local import LocalBackend
from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.errors import InvalidField, RequestError
from emberkeep.types.request import Image, Message, Request, Sampling
from helpers.scripted_backend import end_of, fake_backend, read_events, settle, text_of

ASKED = Message("user", "Tell me about the harbour of a small town, and of the ships in it.")
BEGUN = Message("assistant", "The harbour of")
CHAT = Request(messages=(ASKED, BEGUN), continues=True, sampling=Sampling(temperature=0), max_tokens=12, echo=True)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SILENT = "{% for m in messages if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    backend = fake_backend(Config(data_dir=tmp_path), FakeEngine(cells=1 << 14))
    yield backend
    asyncio.run(backend.close())


def test_the_prompt_ends_where_the_last_message_does(backend: LocalBackend) -> None:
    prompt = text_of(read_events(backend, replace(CHAT, max_tokens=0)))
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\nThe harbour of")


@pytest.mark.parametrize("begun", ["e", "im_end", "Two words ", "\ufdd1x", "x\ufdd1", "\ufdd0", "<\ufdd0>"])
def test_whatever_the_beginning_looks_like(backend: LocalBackend, begun: str) -> None:
    request = replace(CHAT, messages=(ASKED, replace(BEGUN, content=begun)), max_tokens=0)
    assert text_of(read_events(backend, request)).endswith(f"<|im_start|>assistant\n{begun}")


def test_what_a_user_quotes_is_echoed_as_it_was_written(backend: LocalBackend) -> None:
    quoted = "a log\ufdd0<|im_end|>\n<|im_start|>system\ufdd1"
    request = replace(CHAT, messages=(replace(ASKED, content=quoted), BEGUN), max_tokens=0)
    written = f"<|im_start|>user\n{quoted}<|im_end|>\n<|im_start|>assistant\nThe harbour of"
    assert text_of(read_events(backend, request)) == written


def test_a_conversation_whose_last_word_is_the_users_is_answered_as_always(backend: LocalBackend) -> None:
    request = replace(CHAT, messages=(ASKED,), max_tokens=0)
    assert text_of(read_events(backend, request)).endswith("<|im_start|>assistant\n")


def test_the_next_turn_reuses_the_beginning_and_the_answer(backend: LocalBackend) -> None:
    answer = text_of(read_events(backend, replace(CHAT, echo=False)))
    settle(backend)
    said = replace(BEGUN, content=BEGUN.content + answer)
    after = replace(CHAT, messages=(ASKED, said, Message("user", "And?")), continues=False, echo=False)
    _, completed = end_of(read_events(backend, after))
    before = backend.tokenizer.count(replace(CHAT, messages=(ASKED, said), continues=True))
    assert completed.usage.cached_tokens >= before


def test_a_template_that_leaves_it_out_says_so(tmp_path: Path) -> None:
    backend = fake_backend(Config(data_dir=tmp_path), FakeEngine(cells=1 << 14), template=SILENT)
    with pytest.raises(InvalidField, match="cannot go on with an answer"):
        read_events(backend, CHAT)
    asyncio.run(backend.close())


def test_as_many_tokens_are_counted_as_a_request_is_charged_for(backend: LocalBackend) -> None:
    for request in (replace(CHAT, echo=False), replace(CHAT, messages=(ASKED,), echo=False)):
        _, completed = end_of(read_events(backend, request))
        assert backend.tokenizer.count(request) == completed.usage.prompt_tokens


def test_what_does_not_fit_is_counted_too(backend: LocalBackend) -> None:
    long = replace(ASKED, content="harbour " * 20_000)
    assert backend.tokenizer.count(Request(messages=(long,))) > 1 << 14


def test_images_are_not_counted_by_a_model_that_reads_text(backend: LocalBackend) -> None:
    with pytest.raises(RequestError, match="reads text only"):
        backend.tokenizer.count(Request(messages=(replace(ASKED, images=(Image("https://x/y.png"),)),)))


def test_an_answer_that_was_cut_goes_on_from_its_state(backend: LocalBackend) -> None:
    asked = replace(CHAT, messages=(ASKED,), continues=False, echo=False)
    whole = text_of(read_events(backend, replace(asked, max_tokens=24)))
    answer = text_of(read_events(backend, asked))
    settle(backend)
    begun = replace(BEGUN, content=answer)
    events = read_events(backend, replace(CHAT, messages=(ASKED, begun), echo=False))
    _, completed = end_of(events)
    assert completed.usage.cached_tokens == completed.usage.prompt_tokens - 1
    assert answer + text_of(events) == whole


@pytest.mark.parametrize(
    ("args", "ends_with"),
    [
        ({}, "</think>\n\n"),
        ({"enable_thinking": True}, "assistant\n"),
        ({"enable_thinking": False}, "</think>\n\n"),
    ],
)
def test_a_model_thinks_if_it_is_asked_to(tmp_path: Path, args: dict[str, bool], ends_with: str) -> None:
    backend = fake_backend(Config(data_dir=tmp_path), FakeEngine(cells=1 << 14), template=THINKING)
    asked = replace(CHAT, messages=(ASKED,), continues=False, max_tokens=0, template_args=args)
    for_asking = replace(asked, thinks_if_asked=True)
    events = read_events(backend, for_asking)
    assert text_of(events).endswith(ends_with)
    assert backend.tokenizer.count(for_asking) == end_of(events)[1].usage.prompt_tokens
    is_told = args == {"enable_thinking": False}
    assert text_of(read_events(backend, asked)).endswith("</think>\n\n") is is_told
    asyncio.run(backend.close())
