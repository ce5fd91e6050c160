"""Clients that talk, interrupt, edit and go on while their server is killed, and check every answer."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from helpers.server_process import ServerProcess
from helpers.stored_chats import Ids, Said, greedy, possible_prompts, said, text_of

BIAS = {ord(letter): 4.0 for letter in "thean s."}
"""Letters that the tokenizer would join: the ids it gives for an answer are often not those that were sampled."""
_SYSTEMS = [
    f"You are helper {i}. " + "Answer in one line. Say when you are not sure. " * (3 + i) for i in range(3)
]
_MAX_TURNS = 6
_MAX_TOKENS = 24


@dataclass(slots=True)
class Tally:
    """What was seen, over all clients and all lives of the server."""

    answers: int = 0
    interrupted: int = 0
    edits: int = 0
    replayed: int = 0
    """Answers to prompts for which the tokenizer alone gives other ids."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class Client:
    """One user. Its conversations outlive the server's processes."""

    def __init__(self, seed: int, tally: Tally) -> None:
        self._random = random.Random(seed)
        self._tally = tally
        self.conversations: list[list[Said]] = []

    def talk(self, server: ServerProcess, on_event: Callable[[], None]) -> None:
        """Until the server is gone. `on_event` is called for every piece of an answer."""
        while True:
            try:
                self.one_turn(server, on_event)
            except httpx.TransportError:
                server.exit_code()
                return

    def one_turn(self, server: ServerProcess, on_event: Callable[[], None]) -> None:
        """Raises httpx.TransportError when the server goes away."""
        conversation = self._pick()
        if len(conversation) > 3 and self._random.random() < 0.2:
            self._edit(conversation)
        question = said("user", f"Question {self._random.randrange(20)}: what then, and when?")
        stop_after = self._random.randrange(1, 12) if self._random.random() < 0.2 else None
        messages = [*conversation, question]
        text, usage = self._stream(server, messages, stop_after, on_event)
        if usage is None:
            self._tally.add(interrupted=1)
            answer = said("assistant", text, self._partly(messages, text))
        else:
            answer = said("assistant", text, check(self._tally, messages, text, usage))
        if text:
            conversation += [question, answer]

    def _pick(self) -> list[Said]:
        unfinished = [c for c in self.conversations if len(c) < 2 * _MAX_TURNS]
        if not unfinished or self._random.random() < 0.2:
            self.conversations.append([said("system", self._random.choice(_SYSTEMS))])
            return self.conversations[-1]
        return self._random.choice(unfinished)

    def _edit(self, conversation: list[Said]) -> None:
        """Another question in the middle; what was said after it stays."""
        users = [i for i, message in enumerate(conversation) if message.role == "user"]
        conversation[self._random.choice(users)] = said("user", f"No, about {self._random.randrange(10**6)}.")
        self._tally.add(edits=1)

    def _stream(
        self, server: ServerProcess, messages: list[Said], stop_after: int | None, on_event: Callable[[], None]
    ) -> tuple[str, dict[str, int] | None]:
        """The text, and the usage unless the client hung up before the end."""
        text, pieces = "", 0
        body = {**_body(messages), "stream": True, "stream_options": {"include_usage": True}}
        with server.http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                if chunk.get("usage"):
                    return text, _usage(chunk["usage"])
                text += "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
                pieces += 1
                on_event()
                if pieces == stop_after:
                    return text, None
        raise httpx.RemoteProtocolError("the stream ended without its last words")

    def _partly(self, messages: list[Said], text: str) -> Ids:
        """The ids behind the beginning of an answer that ended before its usage came."""
        answers = (greedy(prompt, _MAX_TOKENS, bias=BIAS) for prompt in possible_prompts(messages))
        found = next((answer for answer in answers if text_of(answer).startswith(text)), None)
        assert found is not None, f"{text!r} is the beginning of no right answer"
        return found


def ask(server: ServerProcess, tally: Tally, messages: list[Said]) -> tuple[int, int]:
    """(prompt tokens, of which cached) of one checked answer that is not streamed."""
    reply = server.chat([message.json() for message in messages], **_settings())
    usage = {"prompt_tokens": reply.prompt_tokens, "cached_tokens": reply.cached_tokens}
    check(tally, messages, reply.text, usage)
    return reply.prompt_tokens, reply.cached_tokens


def check(tally: Tally, messages: list[Said], text: str, usage: dict[str, int]) -> Ids:
    """The ids of the answer, which must be what a model without a cache answers."""
    candidates = [prompt for prompt in possible_prompts(messages) if len(prompt) == usage["prompt_tokens"]]
    answers = ((prompt, greedy(prompt, _MAX_TOKENS, bias=BIAS)) for prompt in candidates)
    found = next(((prompt, ids) for prompt, ids in answers if text_of(ids) == text), None)
    assert found is not None, f"{text!r} is wrong after {usage} tokens of {messages[-1].text!r}"
    plain = [Said(message.role, message.text, message.tokenizations[-1:]) for message in messages]
    tally.add(answers=1, replayed=found[0] != next(possible_prompts(plain)), **usage)
    return found[1]


def _settings() -> dict[str, object]:
    return {"max_tokens": _MAX_TOKENS, "logit_bias": {str(token): bias for token, bias in BIAS.items()}}


def _body(messages: list[Said]) -> dict[str, object]:
    return {"messages": [message.json() for message in messages], "temperature": 0, **_settings()}


def _usage(usage: dict[str, object]) -> dict[str, int]:
    details = usage["prompt_tokens_details"]
    assert isinstance(details, dict) and isinstance(usage["prompt_tokens"], int)
    return {"prompt_tokens": usage["prompt_tokens"], "cached_tokens": details["cached_tokens"]}
