"""What comes out of a `TextStream`, gathered."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from emberkeep.chat.output import OutputOptions, TextStream
from emberkeep.types.events import Event, ReasoningDelta, TextDelta, ToolCallDelta
from emberkeep.types.models import Vocab


@dataclass
class Answer:
    text: str = ""
    reasoning: str = ""
    names: list[str | None] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[int] = field(default_factory=list)
    stopped: bool = False
    pushed: int = 0

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case TextDelta():
                    self.text += event.text
                    self.tokens += event.tokens
                    self.logprobs += [logprob.token_id for logprob in event.logprobs]
                case ReasoningDelta():
                    self.reasoning += event.text
                case ToolCallDelta():
                    self.add_call(event)

    def add_call(self, event: ToolCallDelta) -> None:
        if event.name is not None:
            self.names.append(event.name)
            self.ids.append(event.id)
            self.arguments.append("")
        assert event.call_index == len(self.names) - 1
        assert (event.id is None) == (event.name is None)
        self.arguments[-1] += event.arguments

    @property
    def calls(self) -> list[tuple[str | None, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in zip(self.names, self.arguments, strict=True)]


class Pieces:
    """A vocabulary whose tokens are the given texts, so that a stream sees exactly these pieces."""

    def __init__(self, vocab: Vocab, texts: list[str]) -> None:
        self.pieces = [text.encode() for text in texts]
        self.specials = dict.fromkeys(vocab.specials, -1)
        self.controls = frozenset[int]()
        self.eog = frozenset[int]()


def read_text(vocab: Vocab, pieces: list[str], *, cut: bool = False, **options: Any) -> Answer:
    """The answer when it is sampled in these pieces."""
    stream = TextStream(Pieces(vocab, pieces), OutputOptions(**options))  # type: ignore[arg-type]
    answer = Answer()
    for token in range(len(pieces)):
        events, answer.stopped = stream.push(token)
        answer.add(events)
        if answer.stopped:
            break
    answer.add(stream.finish(cut=cut))
    return answer
