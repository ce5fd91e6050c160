"""The fast token path says exactly what the plain encoding would say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.api.answer import detail_json
from emberkeep.api.openai_answer import ChatFrames, Envelope, TextFrames
from emberkeep.types.events import Event, Loading, ReasoningDelta, TextDelta
from helpers.scripted_server import COMPLETED

ENVELOPE = Envelope("id", 5, 'mo"del', "fp", None)
ODD_NAMES = ('mo"del', "\0", '"\0"', "\\u0000")
TEXT = st.text(min_size=1)


def payload(frame: bytes) -> dict[str, Any]:
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    decoded = json.loads(frame.removeprefix(b"data: "))
    assert isinstance(decoded, dict)
    return decoded


@given(TEXT, TEXT, st.integers(0, 15), st.booleans())
def test_a_later_chat_chunk_differs_from_the_first_in_text_and_role_only(
    first: str, later: str, index: int, include_usage: bool
) -> None:
    frames = ChatFrames(ENVELOPE, include_usage=include_usage)
    one = payload(frames.frame(TextDelta(index, first)))
    for delta, event in [
        ({"content": later}, TextDelta(index, later)),
        ({"reasoning_content": later}, ReasoningDelta(index, later)),
    ]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        assert payload(frames.frame(event)) == one | {"choices": [choice]}


@given(TEXT, st.integers(0, 15))
def test_a_text_chunk_holds_the_text(text: str, index: int) -> None:
    frame = TextFrames(ENVELOPE, include_usage=False).frame(TextDelta(index, text))
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    assert payload(frame) == ENVELOPE.head("text_completion") | {"choices": [choice]}


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("kind", [ChatFrames, TextFrames])
def test_a_model_may_have_any_name(kind: type[ChatFrames | TextFrames], name: str) -> None:
    frames = kind(replace(ENVELOPE, model=name), include_usage=True)
    first, later = (payload(frames.frame(TextDelta(0, "\0"))) for _ in range(2))
    assert first["model"] == later["model"] == name
    assert [choice.get("text") or choice["delta"]["content"] for choice in later["choices"]] == ["\0"]


@pytest.mark.parametrize("kind", [ChatFrames, TextFrames])
@pytest.mark.parametrize("event", [TextDelta(0, ""), COMPLETED])
def test_nothing_is_sent_for_what_has_nothing_to_show(kind: type[ChatFrames | TextFrames], event: Event) -> None:
    assert kind(ENVELOPE, include_usage=True).frame(event) == b""


@pytest.mark.parametrize("kind", [ChatFrames, TextFrames])
def test_that_a_model_is_being_loaded_is_a_comment_of_one_line(kind: type[ChatFrames | TextFrames]) -> None:
    frames = kind(ENVELOPE, include_usage=False)
    assert frames.frame(Loading("mine")) == b': "mine" is being loaded\n\n'
    assert frames.frame(Loading("a\nb", 0.5)) == b': "a\\nb" is being loaded, 50%\n\n'


def test_rules_that_changed_the_prompt_are_named() -> None:
    assert "hygiene" not in detail_json(COMPLETED, None)
    assert detail_json(replace(COMPLETED, hygiene=("tool-order",)), None)["hygiene"] == ["tool-order"]
