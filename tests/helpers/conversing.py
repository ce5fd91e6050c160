"""A client that sends the whole history with every request, and a backend over the fake engine that answers it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Event_
from typing import Any

import numpy as np
import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.base import Logits
from emberkeep.engine.fake import FakeEngine
from emberkeep.memory.memory import Memory
from emberkeep.sched.scheduler import Scheduler
from emberkeep.sched.sequence import Sequence as Sequence_
from emberkeep.types.events import Completed, Event, Eviction, Finished, FinishReason, LookupRecord, TextDelta
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Json, Message, Request, Sampling, Tool, ToolCall
from helpers.scripted_backend import calls_of, fake_backend, settle, text_of
from helpers.scripted_server import Running, running

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n"
    "{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 768
SYSTEM = "You keep the books of a harbour."
EOG = FakeEngine().vocab.eog
GREEDY = Sampling(temperature=0)
ENDLESS = Sampling(temperature=0, logit_bias=dict.fromkeys(EOG, -1e9))


class ScriptedEngine(FakeEngine):
    """Says what it is told to say, one text after the other; then what the fake engine says. For one at a time."""

    def __init__(self, *, context: int = CONTEXT) -> None:
        super().__init__(context=context, cells=8 * context, batch=256)
        self._script: deque[int] = deque()
        self._hold_before_the_last = 0
        self._may_end = Event_()

    def will_say(self, *texts: str) -> None:
        for text in texts:
            self._script += [*self.vocab.tokenize(text), self.vocab.specials["<|im_end|>"]]

    def hold_before_the_end(self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was scripted so far is not said to its end before a client has left, however slow it is."""
        self._hold_before_the_last = 50
        cancel = scheduler.cancel

        def cancelled(sequence: Sequence_) -> None:
            cancel(sequence)
            self._may_end.set()

        monkeypatch.setattr(scheduler, "cancel", cancelled)

    def logits(self, index: int, row: int = 0) -> Logits:
        logits = super().logits(index, row)
        if len(self._script) < self._hold_before_the_last:
            assert self._may_end.wait(timeout=60)
        if self._script:
            logits[self._script.popleft()] = 100.0
        return logits


@dataclass(frozen=True, slots=True)
class Answer:
    events: list[Event]
    prompts: list[str]
    """What the model saw, as it saw it at the beginning of each round."""
    prompt_ids: tuple[int, ...]
    """Of the last one."""

    @property
    def prompt(self) -> str:
        return self.prompts[-1]

    @property
    def completed(self) -> Completed:
        last = self.events[-1]
        assert isinstance(last, Completed)
        return last

    @property
    def lookup(self) -> LookupRecord:
        return self.completed.lookup

    @property
    def evictions(self) -> tuple[Eviction, ...]:
        return self.completed.fit.evictions

    @property
    def text(self) -> str:
        return text_of(self.events)

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events if isinstance(event, TextDelta) for token in event.tokens]

    @property
    def reason(self) -> FinishReason:
        (reason,) = [event.reason for event in self.events if isinstance(event, Finished)]
        return reason

    @property
    def calls(self) -> list[ToolCall]:
        return calls_of(self.events)


class Harbour:
    """A backend of its own. Answers are short unless a request says otherwise, and greedy."""

    def __init__(
        self, folder: Path, engine: FakeEngine | None = None, *, template: str = TEMPLATE, **config: Json
    ) -> None:
        self.engine = engine or ScriptedEngine()
        config.setdefault("disk_budget", 0)
        self.backend = fake_backend(Config(data_dir=folder, **config), self.engine, template=template)
        self._runner = asyncio.Runner()
        self._prompts: list[tuple[int, ...]] = []
        submit = self.backend.scheduler.submit

        def seen(sequence: Sequence_) -> None:
            self._prompts.append(tuple(sequence.prompt.tokens.tolist()))
            submit(sequence)

        self.backend.scheduler.submit = seen  # type: ignore[method-assign]

    def __enter__(self) -> Harbour:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.backend.close())
        self._runner.close()

    @property
    def memory(self) -> Memory:
        assert self.backend.memory is not None
        return self.backend.memory

    def ask(self, request: Request) -> Answer:
        """Waits until the turn is closed, so that the next one finds it."""
        (answer,) = self.ask_together([request])
        return answer

    def ask_together(self, requests: Sequence[Request]) -> list[Answer]:
        """All at once; what the model saw is told of them together."""
        self._prompts.clear()

        async def events(request: Request) -> list[Event]:
            return [event async for event in self.backend.generate(request)]

        async def all_of_them() -> list[list[Event]]:
            return await asyncio.gather(*(events(request) for request in requests))

        answers = self._runner.run(all_of_them())
        self.settle()
        texts = [self.backend.tokenizer.detokenize(prompt) for prompt in self._prompts]
        return [Answer(events, texts, self._prompts[-1]) for events in answers]

    def leave_in_the_middle(self, request: Request, after: int) -> None:
        """The client goes away after so many tokens, those that have come with them included."""

        async def some() -> None:
            events, seen = self.backend.generate(request), 0
            while seen < after:
                event = await anext(events)
                seen += len(event.tokens) if isinstance(event, TextDelta) else 0
            await events.aclose()  # type: ignore[attr-defined]

        self._runner.run(some())
        self.settle()

    def count_tokens(self, text: str) -> int:
        return len(self.backend.tokenizer.tokenize(text, add_special=False, parse_special=True))

    def settle(self) -> None:
        settle(self.backend)

    def fresh(self, answer: Answer, **more: Json) -> list[int]:
        """What a model says to the same prompt that has no state which was spliced, moved or stored."""
        more = {"max_tokens": 2, "sampling": GREEDY, **more}
        alone = Request(prompt=answer.prompt_ids, namespace="no user", use_cache=False, **more)
        alone = alone.decided(is_kept=False)
        return self.ask(alone).ids

    def archived(self, owner: str = "") -> list[dict[str, Json]]:
        """The turns in the archive, in the order of archiving."""
        return [row for row in self.memory.export(owner) if row["kind"] == "turn"]

    def archived_texts(self, owner: str = "") -> list[str]:
        """Everything that was said in them."""
        turns = self.archived(owner)
        texts = [turn[part] for turn in turns for part in ("user_text", "assistant_text")]
        texts += [use["result"] for turn in turns for use in turn["tool_uses"]]
        return [one for text in texts for one in text.split("\n\n") if one]


class Client:
    """One conversation."""

    def __init__(self, harbour: Harbour, *, user: str = "", system: str = SYSTEM, **fields: Json) -> None:
        """`fields`: of every request."""
        self._harbour = harbour
        self.system = system
        self.messages: list[Message] = []
        fields.setdefault("sampling", GREEDY)
        fields.setdefault("max_tokens", 2)
        self._fields = {"user": user, "namespace": private_namespace(user), **fields}

    def request(self, **fields: Json) -> Request:
        head = [Message("system", self.system)] if self.system else []
        return Request(messages=(*head, *self.messages), **{**self._fields, **fields})

    def say(self, text: str, **fields: Json) -> Answer:
        self.messages.append(Message("user", text))
        return self.go_on(**fields)

    def go_on(self, **fields: Json) -> Answer:
        """Have what was said so far answered."""
        answer = self._harbour.ask(self.request(**fields))
        self.messages.append(Message("assistant", answer.text, tool_calls=tuple(answer.calls)))
        return answer

    def talk_until_full(self, more: int = 40) -> Answer:
        """Until something has left; the answer of that turn."""
        return next(answer for i in range(more) if (answer := self.say(line(i))).evictions)


def line(number: int, words: int = 10) -> str:
    """A text that is in no other conversation."""
    rng = np.random.default_rng(number)
    names = ["anchor", "barge", "cargo", "dock", "eddy", "ferry", "gull", "hull", "inlet", "jetty", "keel", "lamp"]
    return f"Remark {number}: " + " ".join(rng.choice(names, words)) + "."


SEARCH_CALL = '<tool_call>\n{{"name": "search_memory", "arguments": {{"query": "{}"}}}}\n</tool_call>'
FERRY = Tool("ferry", "When the ferry leaves.", {"type": "object"})


@contextmanager
def asking_server(engine: ScriptedEngine, root: Path, **config: Any) -> Iterator[Running]:
    """`root`: the folder of its file tools."""
    options = {"server_tools": "ask", "tools_root": root, **config}
    with (
        Harbour(root.parent / "data", engine, **options) as harbour,
        running(harbour.backend, Config()) as server,  # type: ignore[arg-type]
    ):
        yield server
