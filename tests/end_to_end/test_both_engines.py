"""The same promises of the store on every engine: restart, edit, share, corrupt, cancel, and what surrounds them.

Tiny models with random weights. Batch shapes change logits a little, and random weights have close seconds: an
answer is the same if it takes the same tokens until two of them are as good as equal.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from emberkeep.bench.servers import is_settled
from emberkeep.config.settings import Config
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.library.results import Result
from emberkeep.types.cache import EntryKind
from emberkeep.types.events import MissReason, Progress
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Execution, Message, Request, Sampling
from helpers import tiny_gguf
from helpers.server_process import ServerProcess, assistant, serve, system, user

pytestmark = pytest.mark.slow

SYSTEM = "Talk like a pirate, be brief, never lie, and count the ships of the harbour. " * 4
QUESTIONS = ("who goes there?", "how many masts?", "what of the moon?")
ANSWER = 8
NOISE = 0.1
"""Of log-probabilities. Those of other prompts are off by several."""


@dataclass(frozen=True)
class Kind:
    engine: str
    model: Path
    unprintable: Mapping[int, float]
    """What is not text would not come back as it was sampled."""


Open = Callable[..., Emberkeep]


@pytest.fixture(scope="module", params=["llamacpp", "hf"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llamacpp":
        unprintable = (3 + byte for byte in (*range(32), *range(127, 256)))
        return Kind("llamacpp", tiny_gguf.dense(folder / "tiny.gguf"), dict.fromkeys(unprintable, -100.0))
    from helpers import tiny_hf

    return Kind("hf", tiny_hf.write(folder / "tiny"), dict.fromkeys(tiny_hf.UNPRINTABLE, -100.0))


def opened(kind: Kind, data: Path, **settings: Any) -> Emberkeep:
    usual = {"model": str(kind.model), "engine": kind.engine, "data_dir": data, "threads": 1}
    return Emberkeep.open(Config(**{**usual, **settings}))


@pytest.fixture
def open_model(kind: Kind, tmp_path: Path) -> Open:
    """Opens the model over the test's folder, in which everything stays from one opening to the next."""
    return lambda **settings: opened(kind, tmp_path / "data", **settings)


@pytest.fixture(scope="module")
def llm(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emberkeep]:
    """One for many tests, each of which is a user of its own."""
    with opened(kind, tmp_path_factory.mktemp("data")) as llm:
        yield llm


@pytest.fixture
def chat(llm: Emberkeep, kind: Kind, request: pytest.FixtureRequest) -> Chat:
    return Chat(llm, kind, request.function.__name__)


class Chat:
    """One client's conversation with a model, greedy."""

    def __init__(self, llm: Emberkeep, kind: Kind, user: str = "") -> None:
        self.llm = llm
        self.kind = kind
        self.user = user
        self.messages: list[Message] = [Message("system", SYSTEM)]

    def request(self, messages: list[Message] | None = None, **fields: Any) -> Request:
        usual = {
            "messages": tuple(self.messages if messages is None else messages),
            "sampling": Sampling(temperature=0, logit_bias=self.kind.unprintable),
            "max_tokens": ANSWER,
            "top_logprobs": 0,
            "user": self.user,
            "namespace": private_namespace(self.user),
        }
        return Request(**{**usual, **fields})

    def ask(self, messages: list[Message] | None = None, **fields: Any) -> Result:
        return self.llm._finish(self.request(messages, **fields))

    def say(self, question: str) -> Result:
        self.messages.append(Message("user", question))
        result = self.ask()
        self.messages.append(Message("assistant", result.text))
        return result

    def checked(self, messages: list[Message] | None = None) -> Result:
        """The answer from stored state, which must be the one without."""
        cached, fresh = self.ask(messages), self.ask(messages, use_cache=False)
        assert fresh.usage.cached_tokens == 0
        assert_same(cached, fresh)
        return cached


def assert_same(one: Result, other: Result) -> None:
    assert one.logprobs and other.logprobs
    for a, b in zip(one.logprobs, other.logprobs, strict=False):
        assert abs(a.logprob - b.logprob) < NOISE
        if a.token_id != b.token_id:
            return
    assert one.text == other.text


def length(result: Result) -> int:
    return result.usage.prompt_tokens + result.usage.completion_tokens


def own_tokens(result: Result) -> int:
    return result.usage.prompt_tokens - result.usage.cached_tokens


def latest_state(llm: Emberkeep) -> str:
    """What the engine has read and written after the latest turn, as text."""
    while not is_settled(llm.stats()):
        pass
    latest = next(entry for entry in llm.cache.entries() if entry.kind is EntryKind.CONVERSATION)
    return llm.cache.show(latest.id).text


def talk(llm: Emberkeep, kind: Kind) -> tuple[Chat, Result]:
    chat = Chat(llm, kind)
    for question in QUESTIONS:
        last = chat.say(question)
    return chat, last


# ── restart ──


def test_after_a_restart_only_new_tokens_are_evaluated(open_model: Open, kind: Kind) -> None:
    with open_model() as llm:
        before, last = talk(llm, kind)
    with open_model() as llm:
        chat = Chat(llm, kind)
        chat.messages = [*before.messages, Message("user", "and the tide?")]
        resumed = chat.ask()
        assert resumed.lookup.cold_tokens == resumed.usage.cached_tokens >= length(last) - 1
        assert_same(resumed, chat.ask(use_cache=False))


def test_every_turn_goes_on_where_the_last_one_ended(chat: Chat) -> None:
    end = 0
    for question in QUESTIONS:
        turn = chat.say(question)
        assert turn.usage.cached_tokens >= end - 1
        end = length(turn)
    assert chat.checked(chat.messages[:-1]).usage.cached_tokens == turn.usage.prompt_tokens - 1


# ── edit ──


def test_an_edited_message_is_evaluated_from_where_it_differs(chat: Chat) -> None:
    first, second, _ = (chat.say(question) for question in QUESTIONS)
    edited = [*chat.messages[:3], Message("user", "how many sails?"), *chat.messages[4:6]]
    result = chat.checked(edited)
    assert length(first) - 1 <= result.usage.cached_tokens < second.usage.prompt_tokens
    assert result.lookup.reason is MissReason.EDITED
    assert result.lookup.divergence is not None
    assert result.lookup.divergence.where == "message 4 (user)"


# ── share ──


def test_conversations_over_one_system_prompt_evaluate_it_once(open_model: Open, kind: Kind) -> None:
    with open_model() as llm:
        first, second = Chat(llm, kind), Chat(llm, kind)
        one = first.say("who goes there?")
        other = second.say("how many masts?")
        assert one.usage.cached_tokens == 0
        assert other.usage.cached_tokens >= len(SYSTEM)
        evaluated = llm.stats()["scheduler"]["evaluated_tokens"]
        assert evaluated < one.usage.prompt_tokens + own_tokens(other) + 2 * (ANSWER + 8)
        if kind.engine == "hf":
            pool = llm.stats()["engine"]["pool"]
            assert pool["shared_blocks"] >= len(SYSTEM) // pool["block_tokens"]
            assert pool["references"] - pool["used_blocks"] >= pool["shared_blocks"]
        assert_same(other, second.ask(second.messages[:-1], use_cache=False))


def test_users_share_nothing(llm: Emberkeep, kind: Kind) -> None:
    alice, bob = Chat(llm, kind, "alice"), Chat(llm, kind, "bob")
    asked = alice.say("who goes there?")
    answered = bob.say("who goes there?")
    assert answered.usage.cached_tokens == 0
    assert_same(answered, asked)
    again = alice.ask(alice.messages[:-1])
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1


# ── corrupt ──


def test_damaged_files_are_noticed_and_evaluated_again(open_model: Open, kind: Kind, tmp_path: Path) -> None:
    with open_model() as llm:
        before, _ = talk(llm, kind)
    for path in (tmp_path / "data").rglob("*.kv"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
    with open_model() as llm:
        chat = Chat(llm, kind)
        repeated = chat.ask(before.messages[:-1])
        assert repeated.usage.cached_tokens == 0
        assert llm.stats()["store"]["cold"]["damaged_chunks"] > 0
        # Not with the conversation's own answer: that was computed in batches of other shapes.
        assert_same(repeated, chat.ask(before.messages[:-1], use_cache=False))
    with open_model() as llm:
        again = Chat(llm, kind).ask(before.messages[:-1])
        assert own_tokens(again) == 1, again.lookup
        assert_same(again, repeated)


# ── cancel ──


def test_a_cancelled_prompt_keeps_what_was_evaluated(open_model: Open, kind: Kind) -> None:
    with open_model() as llm:
        chat = Chat(llm, kind)
        chat.messages = [Message("user", SYSTEM + SYSTEM + "who goes there?")]
        with llm._start(chat.request(want_progress=True, prefill_slice=128)) as stream:
            reached = next(e.processed for e in stream.events() if isinstance(e, Progress) and e.processed)
        assert chat.checked().usage.cached_tokens >= reached > 100


# ── outgrow ──


def test_a_conversation_outgrows_its_context_and_reuses_what_is_left(open_model: Open, kind: Kind) -> None:
    with open_model(ctx=1024, recall="off") as llm:
        chat, turns = Chat(llm, kind), list[Result]()
        while len(turns) < 2 or not turns[-2].evictions:
            chat.messages.append(Message("user", f"ship {len(turns)}, what do you carry?"))
            turns.append(chat.ask())
            chat.messages.append(Message("assistant", turns[-1].text))
            state = latest_state(llm)
            assert SYSTEM in state
            assert chat.messages[-2].content in state
        evicting, after = turns[-2:]
        assert evicting.evictions[0].archived
        assert evicting.lookup.moved_tokens > 0
        assert after.usage.cached_tokens >= length(evicting) - 1
        assert not after.evictions
        assert "ship 0" in llm.memory.search("ship 0")[0].user_text


# ── answers ──


def test_requests_side_by_side_are_answered_as_one_by_one(llm: Emberkeep, kind: Kind) -> None:
    chats = [Chat(llm, kind) for _ in range(6)]
    for number, chat in enumerate(chats):
        chat.messages.append(Message("user", f"ship {number}, how many guns?"))
    alone = [chat.ask(use_cache=False, execution=Execution(is_kept=False)) for chat in chats]
    together: list[Result | None] = [None] * len(chats)

    def ask(number: int) -> None:
        together[number] = chats[number].ask()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(chats))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, together, strict=True):
        assert other is not None
        assert_same(one, other)


def test_logprobs_are_of_the_best_tokens(chat: Chat) -> None:
    result = chat.ask(top_logprobs=3, sampling=Sampling(temperature=0))
    assert len(result.logprobs) == result.usage.completion_tokens == len(result.tokens)
    for token, chosen in zip(result.tokens, result.logprobs, strict=True):
        assert chosen.token_id == token == chosen.top[0].token_id
        best = [candidate.logprob for candidate in chosen.top]
        assert best == sorted(best, reverse=True)
        assert chosen.logprob == best[0] < 0


def test_the_tokens_of_an_echoed_prompt_are_as_likely_as_if_they_were_answers(chat: Chat) -> None:
    ids = tuple(next(iter(chat.kind.unprintable)) + 40 + (7 * i) % 50 for i in range(150))
    echoed = chat.ask(prompt=ids, messages=(), echo=True, max_tokens=0)
    again = chat.ask(prompt=ids, messages=(), echo=True, max_tokens=1)
    forced = chat.ask(prompt=ids[:1], messages=(), forced=ids[1:], max_tokens=len(ids) - 1)
    assert [chosen.token_id for chosen in echoed.logprobs] == list(ids)
    assert math.isnan(echoed.logprobs[0].logprob)
    expected = [chosen.logprob for chosen in forced.logprobs]
    for result in (echoed, again):
        scores = [chosen.logprob for chosen in result.logprobs[1 : len(ids)]]
        assert scores == pytest.approx(expected, abs=NOISE)
    assert len(again.logprobs) == len(ids) + 1


def test_what_is_stored_agrees_with_a_fresh_evaluation(open_model: Open, kind: Kind) -> None:
    with open_model() as llm:
        said = Chat(llm, kind).say(QUESTIONS[0])
    with open_model() as llm:
        (entry,) = (entry for entry in llm.cache.entries() if entry.kind is EntryKind.CONVERSATION)
        assert entry.tokens >= length(said)
        verified = llm.verify_entry(entry.id, 8)
        assert verified.reused_tokens == entry.tokens - 1
        assert verified.agreed > 0


# ── served ──


def served(kind: Kind, data: Path) -> ServerProcess:
    return serve(kind.model, data, "--engine", kind.engine)


def test_a_killed_server_goes_on_where_it_was(kind: Kind, tmp_path: Path) -> None:
    messages = [system(SYSTEM)]
    bias = {str(token): value for token, value in kind.unprintable.items()}
    fields = {"max_tokens": ANSWER, "logit_bias": bias}
    with served(kind, tmp_path) as server:
        for question in QUESTIONS:
            messages.append(user(question))
            reply = server.chat(messages, **fields)
            messages.append(assistant(reply.text))
        server.wait_until_stored()
        server.kill()
    messages.append(user("and the tide?"))
    with served(kind, tmp_path) as server:
        resumed = server.chat(messages, **fields)
        assert resumed.cached_tokens >= reply.prompt_tokens + reply.completion_tokens - 1
        assert server.chat(messages, cache_prompt=False, **fields).text == resumed.text
        server.stop()
