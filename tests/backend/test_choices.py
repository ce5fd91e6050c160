from __future__ import annotations

import asyncio

import pytest

from emberkeep.backend import choices
from emberkeep.backend.choices import Channel, Outbox, Samplers
from emberkeep.engine.fake import FakeVocab
from emberkeep.types.request import Request, Sampling

VOCAB = FakeVocab()


def settings_of(sampling: Sampling) -> Sampling:
    return Samplers(VOCAB).with_ids(sampling)


def test_usual_settings_stay_as_they_are() -> None:
    usual = Sampling(seed=3)
    assert settings_of(usual) is usual


def test_the_bias_of_a_text_is_that_of_its_tokens() -> None:
    a, b = VOCAB.tokenize("ab")
    settings = settings_of(Sampling(logit_bias={a: 1.0}, text_bias=(("ab", -0.5), ("b", -1.0))))
    assert settings.logit_bias == {a: 0.5, b: -1.5}


def test_nothing_that_ends_an_answer_is_drawn_where_ends_are_ignored() -> None:
    settings = settings_of(Sampling(ignore_eos=True))
    assert settings.logit_bias == dict.fromkeys(VOCAB.eog, float("-inf"))


def test_texts_that_end_repetitions_are_looked_for_once_and_only_where_they_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_for: list[tuple[str, ...]] = []
    monkeypatch.setattr(choices, "find_breakers", lambda texts, vocab: looked_for.append(texts) or {})
    samplers = Samplers(VOCAB)
    samplers.of_request(Request(prompt=""), None)
    assert looked_for == []
    for _ in range(2):
        samplers.of_request(Request(prompt="", sampling=Sampling(dry_multiplier=0.8)), None)
    assert looked_for == [Sampling().dry_sequence_breakers]


READERS = 6


def woken(monkeypatch: pytest.MonkeyPatch, urgent: int | None = None) -> list[list[int]]:
    """Who of `READERS` gets their tokens after each of 12 steps, in which there is time for two of them."""
    clock = [1000.0]
    monkeypatch.setattr(choices, "monotonic", lambda: clock[0])

    async def steps() -> list[list[int]]:
        outbox, told = Outbox(), list[list[int]]()
        channels = [Channel[int](outbox) for _ in range(READERS)]

        async def read(number: int) -> None:
            while True:
                await channels[number].take()
                told[-1].append(number)

        reading = [asyncio.create_task(read(number)) for number in range(READERS)]
        for step in range(12):
            told.append([])
            for number, channel in enumerate(channels):
                channel.put(step, can_wait=number != urgent)
            clock[0] += 2.53 * choices._PER_READER_S
            outbox.flush(False)
            for _ in range(5):
                await asyncio.sleep(0)
        for task in reading:
            task.cancel()
        return told

    return asyncio.run(steps())


def test_readers_for_whom_there_is_no_time_in_every_step_are_woken_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *later = woken(monkeypatch)
    assert first == list(range(READERS))  # nobody had been woken for long
    assert {len(step) for step in later} == {2, 3}  # what is left of a step's time counts for the next
    for begin in range(len(later) - 2):
        assert {number for step in later[begin : begin + 3] for number in step} == set(range(READERS))


def test_what_cannot_wait_is_told_at_once_and_holds_nobody_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told = woken(monkeypatch, urgent=READERS - 1)
    assert all(READERS - 1 in step for step in told)
    for other in range(READERS - 1):
        assert sum(other in step for step in told) >= 4
