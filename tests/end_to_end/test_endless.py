"""Conversations longer than the context, with the real default model: over HTTP, and in the chat."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

from emberkeep.types.request import Json
from helpers.commands import emberkeep
from helpers.server_process import ServerProcess, assistant, serve, system, user

pytestmark = pytest.mark.slow

CONTEXT = 1024
LENGTH = 3 * CONTEXT
RULES = "You keep the only lighthouse of Skerry Island. Answer in a few words."
SHORT = (
    "Ahoy?",
    "Bravo!",
    "Alas!",
    "Hush!",
    "Egad!",
    "Indeed?",
    "Oho!",
    "Perhaps?",
    "Quite!",
    "Truly?",
    "Pardon?",
)
"""So few tokens that nearly all of a prompt can be what was there before, and hardly anything that is recalled."""
THINGS = ("gulls", "ropes", "lamps", "tides", "barrels", "nets", "sails", "crabs", "pipes", "coins", "maps")
NO_MARKS = {"0": -100, "1": -100, "2": -100}
"""With which SmolLM2 would end its answer, or begin another message."""


def story(number: int) -> str:
    """About 100 tokens."""
    seen = ", ".join(f"{number * 7 + i} {THINGS[(number + i) % len(THINGS)]}" for i in range(16))
    return f"On day {number} of the voyage of the Marigold we counted {seen}. What would you do?"


@dataclass(frozen=True, slots=True)
class Turn:
    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    detail: Json
    state: str
    """What the engine has read and written after it, as text."""

    @property
    def reuse(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def evicted(self) -> bool:
        return "evictions" in self.detail


@dataclass
class Talk:
    """A client that sends the whole history with every turn."""

    messages: list[Json] = field(default_factory=lambda: [system(RULES)])
    turns: list[Turn] = field(default_factory=list)
    length: int = 0

    def short(self) -> str:
        return next(word for word in SHORT if user(word) not in self.messages)

    def say(self, server: ServerProcess, text: str, **fields: Json) -> Turn:
        self.messages.append(user(text))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model="default",
                messages=self.messages,
                temperature=0,
                max_tokens=fields.pop("max_tokens", 8),
                extra_body=fields,
            )
        turn = turn_of(answer, latest_state(server))
        self.messages.append(assistant(turn.text))
        self.turns.append(turn)
        tokens = server.http.post(f"{server.url}/tokenize", json={"content": text}).json()["tokens"]
        self.length += len(tokens) + turn.completion_tokens
        assert RULES in turn.state
        assert text in turn.state
        return turn


def turn_of(answer: openai.types.chat.ChatCompletion, state: str) -> Turn:
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.model_extra is not None
    return Turn(
        text=answer.choices[0].message.content or "",
        prompt_tokens=answer.usage.prompt_tokens,
        completion_tokens=answer.usage.completion_tokens,
        cached_tokens=answer.usage.prompt_tokens_details.cached_tokens or 0,
        detail=answer.model_extra["emberkeep"],
        state=state,
    )


def latest_state(server: ServerProcess) -> str:
    server.wait_until_stored()
    (entry,) = server.http.get(f"{server.url}/v1/cache?kind=conversation&limit=1").json()["data"]
    return str(server.http.get(f"{server.url}/v1/cache/{entry['id']}?chars=1000000").json()["text"])


def served(model: Path, data_dir: Path) -> ServerProcess:
    return serve(model, data_dir, "--ctx", str(CONTEXT), "--parallel", "1")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("endless")


@pytest.fixture(scope="module")
def talk(smollm2: Path, home: Path) -> Talk:
    """A first half, until the server is killed."""
    talk = Talk()
    with served(smollm2, home) as server:
        while talk.length < LENGTH or talk.turns[-1].evicted:
            after_eviction = bool(talk.turns) and talk.turns[-1].evicted
            talk.say(server, talk.short() if after_eviction else story(len(talk.turns)))
        server.kill()
    return talk


@pytest.fixture(scope="module")
def server(smollm2: Path, home: Path, talk: Talk) -> Iterator[ServerProcess]:
    """The second one on the same folder."""
    with served(smollm2, home) as server:
        yield server


def test_messages_leave_and_the_next_turn_reuses_what_is_left(talk: Talk) -> None:
    evictions = [turn.detail["evictions"] for turn in talk.turns if turn.evicted]
    assert len(evictions) >= 3
    assert all(one["archived"] for several in evictions for one in several)
    following = [after for before, after in zip(talk.turns, talk.turns[1:], strict=False) if before.evicted]
    nothing_came_back = [turn for turn in following if "recalled" not in turn.detail]
    assert len(nothing_came_back) >= 3
    assert min(turn.reuse for turn in nothing_came_back) > 0.95
    assert not any(turn.evicted for turn in following)


def test_after_a_kill_the_same_messages_are_out_and_nothing_is_evaluated_again(
    talk: Talk, server: ServerProcess
) -> None:
    before = talk.turns[-1]
    turn = talk.say(server, talk.short())
    assert not turn.evicted
    assert turn.state.startswith(before.state)
    assert turn.reuse > 0.9


def test_an_answer_that_fills_the_context_goes_on(talk: Talk, server: ServerProcess) -> None:
    long = CONTEXT - talk.turns[-1].prompt_tokens + 64
    full = talk.say(server, "Tell me everything.", max_tokens=long, logit_bias=NO_MARKS)
    assert full.completion_tokens == long
    assert full.evicted
    assert full.state.rstrip().endswith(f"{full.text}<|im_end|>")
    assert talk.say(server, talk.short()).reuse > 0.9


def test_what_left_is_found_by_its_user(talk: Talk, server: ServerProcess) -> None:
    def found(query: str, **fields: Json) -> list[str]:
        asked = server.http.get(f"{server.url}/v1/memory/search", params={"query": query, **fields})
        assert asked.status_code == 200, f"{asked.text}\n{server.log}"
        return [one["user_text"] for one in asked.json()["data"]]

    assert story(1) in found("day 1 of the Marigold", max_results=3)
    assert found("Marigold", user_id="bob") == []


def test_without_eviction_a_long_conversation_is_refused(talk: Talk, server: ServerProcess) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(
            openai.BadRequestError,
            match=r"maximum context length is 1024 tokens and .*: send less, let old messages leave",
        ),
    ):
        client.chat.completions.create(
            model="default", messages=[*talk.messages, user(SHORT[0])], extra_body={"evict": False}
        )


def test_exact_answers_of_a_long_conversation_are_not_approximate(server: ServerProcess) -> None:
    exact = Talk()
    while not any(turn.evicted for turn in exact.turns):
        exact.say(server, f"{story(len(exact.turns))} {story(50)}", approximate=False)
    after = exact.say(server, exact.short(), approximate=False)
    assert after.reuse > 0.95
    assert not any(turn.detail["approximate"] or turn.detail["moved_tokens"] for turn in exact.turns)


# ── the chat ──

REUSED = re.compile(r"reused (\d+)/(\d+) tokens")


def test_a_chat_outlasts_its_context(smollm2: Path, tmp_path: Path) -> None:
    lines = [line for i, word in enumerate(SHORT[:8]) for line in (f"{story(i)} {story(i + 40)}", word)]
    options = ("--ctx", str(CONTEXT), "--max-tokens", "8", "-t", "0", "--system", RULES)
    done = emberkeep(tmp_path, "chat", str(smollm2), *options, said="\n".join(lines))
    remarks = [line for line in done.stderr.splitlines() if REUSED.search(line)]
    assert len(remarks) == len(lines)
    evicted = [i for i, remark in enumerate(remarks) if "left the context (archived)" in remark]
    assert len(evicted) >= 2
    for remark in (remarks[i + 1] for i in evicted if lines[i] not in SHORT):
        reused = REUSED.search(remark)
        assert reused is not None
        assert int(reused[1]) > 0.95 * int(reused[2])
    entries = json.loads(emberkeep(tmp_path, "cache", "ls", "--json").stdout)
    latest = next(entry for entry in entries if entry["kind"] == "conversation")
    state = emberkeep(tmp_path, "cache", "show", latest["id"], "--chars", "100000", "--model", str(smollm2)).stdout
    assert RULES in state
    assert f"{lines[-1]}<|im_end|>" in state
