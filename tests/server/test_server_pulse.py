"""`/v1/events`: what the server does right now, for as many as watch, and for nobody when none do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing

import httpx
import pytest

from emberkeep.config.settings import Config
from emberkeep.errors import Overloaded
from emberkeep.server.routes import pulse
from emberkeep.server.routes.pulse import Pulse
from helpers.cache_server import SYSTEM, Served, served, user
from helpers.scripted_server import ScriptedBackend, running

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sea(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("data")) as sea:
        yield sea


def told(lines: Iterator[str]) -> dict:
    """The next event."""
    return json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))


def test_what_changes_is_told_without_being_asked_for(sea: Served) -> None:
    with sea.client.stream("GET", "/v1/events") as watching:
        assert watching.headers["content-type"].startswith("text/event-stream")
        lines = watching.iter_lines()
        before = told(lines)
        answer = sea.chat(SYSTEM, user("When is high tide?"))
        after = told(lines)
        while after["tokens"]["prompt"] == before["tokens"]["prompt"] or after["active"]:
            after = told(lines)
    grown = after["tokens"]["prompt"] - before["tokens"]["prompt"]
    assert grown == answer["usage"]["prompt_tokens"]
    assert after["tiers"]["warm"]["tokens"] > before["tiers"]["warm"]["tokens"]
    assert after["tiers"]["warm"]["budget"] > 0


def test_a_backend_without_a_store_can_be_watched_too() -> None:
    with (
        running(ScriptedBackend(), Config()) as server,
        httpx.Client(base_url=server.url) as client,
        client.stream("GET", "/v1/events") as watching,
    ):
        assert told(watching.iter_lines())["tokens"]["prompt"] == 0


def test_who_watches_does_not_keep_the_server_from_stopping() -> None:
    with running(ScriptedBackend(), Config()) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        with client.stream("GET", "/v1/events") as watching:
            lines = watching.iter_lines()
            told(lines)
            server.stop()
            assert list(lines)[-1:] in ([], [""])
        server.thread.join(30)
        assert not server.thread.is_alive()


# ── the pulse itself ──


class Figures:
    value = 0

    def __call__(self) -> dict:
        return {"value": self.value}


def value(frame: bytes) -> int:
    return json.loads(frame.removeprefix(b"data: "))["value"]


async def test_figures_are_read_once_for_all_and_never_for_nobody() -> None:
    figures, others = Figures(), asyncio.all_tasks()
    beat = Pulse(figures, every_s=0.01)
    async with aclosing(beat.watch(lambda: False)) as one, aclosing(beat.watch(lambda: False)) as other:
        assert value(await anext(one)) == value(await anext(other)) == 0
        figures.value = 7
        assert value(await anext(one)) == value(await anext(other)) == 7
    (reading,) = asyncio.all_tasks() - others
    await reading  # which ends by itself when nobody watches
    async with aclosing(beat.watch(lambda: False)) as again:
        assert value(await anext(again)) == 7


async def test_who_reads_slowly_gets_the_latest() -> None:
    figures = Figures()
    beat = Pulse(figures, every_s=0.01)
    async with aclosing(beat.watch(lambda: False)) as slow, aclosing(beat.watch(lambda: False)) as quick:
        assert value(await anext(slow)) == value(await anext(quick)) == 0
        for figures.value in (1, 2, 3):
            assert value(await anext(quick)) == figures.value
        assert value(await anext(slow)) == 3


async def test_silence_is_broken_and_the_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_SILENCE_S", 0.03)
    is_over = False
    beat = Pulse(Figures(), every_s=0.01)
    async with aclosing(beat.watch(lambda: is_over)) as frames:
        await anext(frames)
        assert (await anext(frames)).startswith(b":")
        is_over = True
        async for _ in frames:
            raise AssertionError("something came after the end")


async def test_figures_that_cannot_be_read_now_are_read_later(caplog: pytest.LogCaptureFixture) -> None:
    readings = iter([{}, {"value": 1}])

    def read() -> dict:
        return next(readings, {"value": 1}) or {}["not now"]

    async with aclosing(Pulse(read, every_s=0.01).watch(lambda: False)) as frames:
        assert value(await anext(frames)) == 1
    assert "could not be told" in caplog.text


async def test_too_many_watchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_MOST_WATCHERS", 1)
    beat = Pulse(Figures(), every_s=0.01)
    async with aclosing(beat.watch(lambda: False)) as one:
        await anext(one)
        with pytest.raises(Overloaded, match="close one of these pages"):
            await anext(beat.watch(lambda: False))
