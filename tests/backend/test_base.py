"""What a model that runs elsewhere cannot do, as users are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from emberkeep.backend.base import (
    attention_of,
    cache_of,
    embedder_of,
    experts_of,
    keep_warm,
    ranker_of,
    speculation_of,
    tokenizer_of,
    warm_prefix,
)
from emberkeep.backend.remote.backend import RemoteBackend
from emberkeep.errors import NoSuchEntry, RequestError
from emberkeep.types.cache import Removed
from emberkeep.types.models import SpeculationStats
from emberkeep.types.request import Message, Request
from helpers.remote_model import ScriptedProvider, remote
from helpers.scripted_backend import ScriptedBackend

PREFIX = Request(messages=(Message("system", "You are brief."),))


@pytest.fixture
def far() -> RemoteBackend:
    return remote(ScriptedProvider(lambda request: []))


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (tokenizer_of, "far runs elsewhere and does not tell its tokens: use a model that runs here"),
        (lambda far: tokenizer_of(far, "template"), "far runs elsewhere and does not tell its template: use"),
        (experts_of, "far runs elsewhere and does not tell its experts: use"),
        (attention_of, "far runs elsewhere and computes attention as it likes: use"),
        (embedder_of, "far runs elsewhere and neither embeds nor ranks for clients of"),
        (ranker_of, "far runs elsewhere and neither embeds nor ranks for clients of"),
    ],
)
def test_what_a_model_elsewhere_cannot_do(far: RemoteBackend, wanted: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=f"^{sentence}"):
        wanted(far)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (embedder_of, "scripted gives no embeddings: name a model .*models pull hf:.*embed"),
        (ranker_of, "scripted does not rank documents: name a model .*pull hf:.*reranker"),
        (experts_of, "scripted is not a mixture of experts: load a model that is one"),
        (attention_of, "scripted has one way to compute attention: tiers are for --engine hf"),
    ],
)
def test_what_a_model_here_may_not_have(wanted: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=f"^{sentence}"):
        wanted(ScriptedBackend(lambda request: []))


def test_nothing_is_drafted_for_it(far: RemoteBackend) -> None:
    assert speculation_of(far) == SpeculationStats(False, "far runs elsewhere: nothing is drafted here.")


def test_nothing_of_it_is_warmed(far: RemoteBackend, caplog: pytest.LogCaptureFixture) -> None:
    warmed = asyncio.run(warm_prefix(far, PREFIX))
    assert (warmed.tokens, warmed.entry_id) == (0, "")
    assert warmed.error == "far runs elsewhere: its prompts cannot be warmed from here."
    with caplog.at_level(logging.INFO, "emberkeep.remote"):
        keep_warm(far, [])
        assert not caplog.messages
        keep_warm(far, [PREFIX])
    assert caplog.messages == ["far runs elsewhere: nothing is warmed."]


def test_its_cache_is_empty(far: RemoteBackend) -> None:
    cache = cache_of(far)
    assert cache.entries() == []
    assert cache.gc() == cache.remove_user("ann") == Removed(0, 0)
    for act in (
        lambda: cache.show("0123456789ab"),
        lambda: cache.remove("0123456789ab"),
        lambda: cache.pin("0123456789ab", True),
        lambda: cache.explain(PREFIX),
        lambda: asyncio.run(cache.verify("0123456789ab", 8)),
    ):
        with pytest.raises(NoSuchEntry, match="far runs elsewhere: nothing of it is stored here"):
            act()
