"""Sampled tokens to events: bytes to text, stop strings, reasoning, tool calls."""

from __future__ import annotations

import codecs
import secrets
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from emberkeep.chat.dialects import CallPiece, Reasoning, framing, hidden_tokens, open_reasoning
from emberkeep.chat.sections import Kind, Section, Sections
from emberkeep.chat.stops import StopScanner
from emberkeep.types import (
    Event,
    ReasoningDelta,
    ReasoningFormat,
    Request,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCallDelta,
    Vocab,
)


@dataclass(slots=True)
class _Sampled:
    """A token whose text, characters [start, end) of the stream, has not been passed on yet."""

    token: int
    logprob: TokenLogprob | None
    start: int
    end: int


class TextStream:
    """One choice of one request. Not thread-safe; `push` is called for every token, `finish` once."""

    def __init__(
        self,
        vocab: Vocab,
        *,
        index: int = 0,
        stop: tuple[str, ...] = (),
        tools: Iterable[Tool] = (),
        one_call: bool = False,
        reasoning: Reasoning | None = None,
        reasoning_format: ReasoningFormat = ReasoningFormat.SEPARATE,
        raw: bool = False,
    ) -> None:
        """`tools`: those that may be called. `reasoning`: the block that the prompt has opened. `raw`: the text
        goes through as it is."""
        self._pieces = vocab.pieces
        self._hidden = hidden_tokens(vocab)
        self._index = index
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopScanner(stop)
        callable_tools = {tool.name: tool for tool in tools}
        self._sections = None if raw else Sections(callable_tools, reasoning, framing(vocab))
        self._reasoning_format = reasoning_format
        self._one_call = one_call
        self._has_its_call = False
        self._calls = 0
        self._call_was_cut = False
        self._decoded = 0
        self._passed = 0
        self._stopped = False
        self._ends: list[int] = []
        self._waiting: deque[_Sampled] = deque()
        self.reasoning_tokens = 0

    @classmethod
    def for_request(cls, vocab: Vocab, request: Request, *, index: int, prompt: str) -> TextStream:
        """`prompt` is the rendered text, whose end may have opened a reasoning block."""
        with_tools = request.tool_choice.mode != "none" and not request.raw_tools
        return cls(
            vocab,
            index=index,
            stop=request.stop,
            tools=request.tools if with_tools else (),
            one_call=not request.parallel_tool_calls,
            reasoning=open_reasoning(prompt),
            reasoning_format=request.reasoning or ReasoningFormat.SEPARATE,
            raw=request.prompt is not None,
        )

    @property
    def saw_tool_calls(self) -> bool:
        """The answer came to its end with calls; one that was cut does not count."""
        return self._calls > 0 and not self._call_was_cut

    @property
    def text_kept_tokens(self) -> int:
        """How many of the tokens pushed lie wholly before the stop string; all, when none has come."""
        return bisect_right(self._ends, self._passed) if self._stopped else len(self._ends)

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> tuple[list[Event], bool]:
        """Events that became certain, and whether generation should stop here (then call `finish`)."""
        if token_id in self._hidden:
            self._ends.append(self._decoded)
            return [], False
        start = self._decoded
        text = self._decoder.decode(self._pieces[token_id])
        self._decoded += len(text)
        # A character of which only some bytes have come counts as the text of all its tokens.
        end = self._decoded + bool(self._decoder.getstate()[0])
        self._ends.append(end)
        self._waiting.append(_Sampled(token_id, logprob, start, end))
        return (self._pass_on(text), self._stopped or self._has_its_call) if text else ([], False)

    def finish(self, *, cut: bool = False) -> list[Event]:
        """What was held back. `cut`: the answer had to end here (max_tokens, the context)."""
        if self._has_its_call:
            return []
        events: list[Event] = []
        if not self._stopped:
            events += self._pass_on(self._decoder.decode(b"", final=True))
            if not self._stopped:
                events += self._sectioned(self._stops.flush())
        if self._sections:
            events += self._events(self._sections.finish(cut=cut))
        return events + self._left_over()

    def _pass_on(self, text: str) -> list[Event]:
        passed, self._stopped = self._stops.feed(text)
        return self._sectioned(passed)

    def _sectioned(self, text: str) -> list[Event]:
        if not text:
            return []
        self._passed += len(text)
        if self._sections is None:
            return [self._text_delta(text, self._passed)]
        return self._events(self._sections.feed(text))

    def _events(self, sections: list[Section]) -> list[Event]:
        events: list[Event] = []
        for section in sections:
            if self._has_its_call:
                break
            match section.kind:
                case Kind.TEXT:
                    events.append(self._text_delta(section.text, section.end))
                case Kind.REASONING | Kind.AROUND_REASONING:
                    events += self._reasoning_events(section)
                case Kind.CALLS | Kind.CUT_CALL:
                    events += self._call_events(section)
                case Kind.HIDDEN:
                    self._drop_inside(section.end)
        return events

    def _reasoning_events(self, section: Section) -> list[Event]:
        is_thought = section.kind is Kind.REASONING
        if self._reasoning_format is ReasoningFormat.INLINE:
            delta = self._text_delta(section.text, section.end)
            self.reasoning_tokens += is_thought * len(delta.tokens)
            return [delta]
        self.reasoning_tokens += is_thought * self._drop_inside(section.end)
        is_shown = is_thought and self._reasoning_format is ReasoningFormat.SEPARATE
        return [ReasoningDelta(self._index, section.text)] if is_shown else []

    def _call_events(self, section: Section) -> list[Event]:
        self._drop_inside(section.end)
        self._call_was_cut |= section.kind is Kind.CUT_CALL
        events: list[Event] = []
        for pieces in _by_call(section.pieces):
            is_new = pieces[0].name is not None
            if is_new and self._one_call and self._calls:
                self._has_its_call = True
                return events
            self._calls += is_new
            id = f"call_{secrets.token_hex(12)}" if is_new else None
            arguments = "".join(piece.arguments for piece in pieces)
            if is_new or arguments:
                events.append(ToolCallDelta(self._index, self._calls - 1, id, pieces[0].name, arguments))
        self._has_its_call = self._one_call and section.is_end
        return events

    def _text_delta(self, text: str, end: int) -> TextDelta:
        """With every token that begins before `end`: also one of which the rest will stay invisible."""
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        waiting = self._waiting
        while waiting and waiting[0].start < end:
            sampled = waiting.popleft()
            tokens.append(sampled.token)
            if sampled.logprob is not None:
                logprobs.append(sampled.logprob)
        return TextDelta(self._index, text, tuple(logprobs), tuple(tokens))

    def _drop_inside(self, end: int) -> int:
        """Forget tokens that lie wholly before `end`; they are no visible text."""
        count = len(self._waiting)
        while self._waiting and self._waiting[0].end <= end:
            self._waiting.popleft()
        return count - len(self._waiting)

    def _left_over(self) -> list[Event]:
        """Logprobs of tokens that have no text of their own, such as an empty piece at the end."""
        if self._stopped or self._calls or all(sampled.logprob is None for sampled in self._waiting):
            return []
        return [self._text_delta("", self._decoded + 1)]


def _by_call(pieces: Sequence[CallPiece]) -> list[list[CallPiece]]:
    """The pieces of each call together; the first may go on with a call that has begun before."""
    groups: list[list[CallPiece]] = []
    for piece in pieces:
        if piece.name is not None or not groups:
            groups.append([])
        groups[-1].append(piece)
    return groups
