"""Sampled tokens to events: bytes to text, up to a stop string, then reasoning, tool calls and text.

`TextStream` has every token of one choice pass through a UTF-8 decoder, `StopScanner` and `Sections`, and makes
events of what comes out.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from time import monotonic

from emberkeep.chat.dialects.reader import CallPiece
from emberkeep.chat.dialects.table import HARMONY, HARMONY_TOKENS, MARKER_TOKENS, REASONING, Reasoning
from emberkeep.chat.sections import AnswerSection, SectionKind, Sections, pieces_of, text_of
from emberkeep.types.events import Event, ReasoningDelta, TextDelta, TokenLogprob, ToolCallDelta
from emberkeep.types.models import Vocab
from emberkeep.types.request import Message, ReasoningFormat, Request, Tool, ToolCall, new_call_id
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a request wants of the text of its answer."""

    stop: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    """Those that may be called."""
    one_call: bool = False
    no_repeats: bool = False
    """The answer ends before a call that is the one before it again."""
    reasoning: Reasoning | None = None
    """The block that the prompt has opened."""
    reasoning_format: ReasoningFormat = ReasoningFormat.SEPARATE
    raw: bool = False
    """The text goes through as it is."""
    lines: LineLimit | None = None


class TextStream:
    """One choice of one request. Not thread-safe; `push` is called for every token (or `push_together` for some),
    `finish` once."""

    def __init__(self, vocab: Vocab, options: OutputOptions, *, index: int = 0) -> None:
        self._pieces = vocab.pieces
        self._hidden = hidden_tokens(vocab)
        self._index = index
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopScanner(options.stop)
        self._lines = options.lines
        tools = {tool.name: tool for tool in options.tools}
        self.may_stop = bool(options.stop or options.lines or options.one_call or options.no_repeats)
        """Whether something in its text may end the answer."""
        self._sections = None if options.raw else Sections(tools, options.reasoning, framing(vocab))
        self._reasoning_format = options.reasoning_format
        self._one_call = options.one_call
        self._repeats = _RepeatedCalls(options.no_repeats)
        self._calls_end: int | None = None
        self._has_its_call = False
        self._calls = 0
        self._call_was_cut = False
        self._decoded = 0
        self._passed = 0
        self.stop: str | None = None
        """The stop string that has come."""
        self.is_cut = False
        """Its lines have ended it."""
        self._ends: list[int] = []
        self._waiting: deque[_Sampled] = deque()
        self.reasoning_tokens = 0

    @classmethod
    def for_request(cls, vocab: Vocab, request: Request, *, index: int, prompt: str) -> TextStream:
        """`prompt` is the rendered text, whose end may have opened a reasoning block."""
        options = OutputOptions(
            stop=request.stop,
            tools=request.callable_tools,
            one_call=not request.parallel_tool_calls,
            no_repeats=request.tool_choice.mode == "required",
            reasoning=open_reasoning(prompt),
            reasoning_format=request.reasoning or ReasoningFormat.SEPARATE,
            raw=request.prompt is not None,
            lines=LineLimit(request.line_seconds, request.indent) if request.limits_lines else None,
        )
        return cls(vocab, options, index=index)

    @property
    def saw_tool_calls(self) -> bool:
        """The answer came to its end with calls; one that was cut does not count."""
        return self._calls > 0 and not self._call_was_cut

    @property
    def text_kept_tokens(self) -> int:
        """How many of the tokens pushed lie wholly before the stop string, or before what is not wanted; all, when
        none has come."""
        end = self._passed if self.stop or self.is_cut else self._calls_end
        return len(self._ends) if end is None else bisect_right(self._ends, end)

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> tuple[list[Event], bool]:
        """Events that became certain, and whether generation should stop here (then call `finish`)."""
        text = self._decode(token_id, logprob)
        return (self._pass_on(text), self._is_over) if text else ([], False)

    def push_together(self, sampled: Iterable[tuple[int, TokenLogprob | None]]) -> list[Event]:
        """As `push` for each, where nothing may end the answer: what they say comes in one piece."""
        text = "".join([self._decode(token_id, logprob) for token_id, logprob in sampled])
        return self._pass_on(text) if text else []

    def _decode(self, token_id: int, logprob: TokenLogprob | None) -> str:
        """The characters that became certain."""
        if token_id in self._hidden:
            self._ends.append(self._decoded)
            return ""
        start = self._decoded
        text = self._decoder.decode(self._pieces[token_id])
        self._decoded += len(text)
        # A character of which only some bytes have come counts as the text of all its tokens.
        end = self._decoded + bool(self._decoder.getstate()[0])
        self._ends.append(end)
        self._waiting.append(_Sampled(token_id, logprob, start, end))
        return text

    def finish(self, *, cut: bool = False) -> list[Event]:
        """What was held back. `cut`: the answer had to end here (max_tokens, the context)."""
        if self._has_its_call:
            return []
        events: list[Event] = []
        if not self._is_over:
            events += self._pass_on(self._decoder.decode(b"", final=True))
        if self.stop is None:
            events += self._pass_to_sections(self._stops.flush())
        if self._sections:
            events += self._events(self._sections.finish(cut=cut))
        return events + self._left_over()

    @property
    def _is_over(self) -> bool:
        return self.stop is not None or self.is_cut or self._has_its_call

    def _pass_on(self, text: str) -> list[Event]:
        if self._lines is not None:
            text, self.is_cut = self._lines.feed(text)
        passed, self.stop = self._stops.feed(text)
        return self._pass_to_sections(passed)

    def _pass_to_sections(self, text: str) -> list[Event]:
        if not text:
            return []
        self._passed += len(text)
        if self._sections is None:
            return [self._text_delta(text, self._passed)]
        return self._events(self._sections.feed(text))

    def _events(self, sections: list[AnswerSection]) -> list[Event]:
        events: list[Event] = []
        for section in sections:
            if self._has_its_call:
                break
            match section.kind:
                case SectionKind.TEXT:
                    events.append(self._text_delta(section.text, section.end))
                case SectionKind.REASONING | SectionKind.AROUND_REASONING:
                    events += self._reasoning_events(section)
                case SectionKind.CALLS | SectionKind.CUT_CALL:
                    events += self._call_events(section)
                case SectionKind.HIDDEN:
                    self._drop_inside(section.end)
        return events

    def _reasoning_events(self, section: AnswerSection) -> list[Event]:
        is_thought = section.kind is SectionKind.REASONING
        if self._reasoning_format is ReasoningFormat.INLINE:
            delta = self._text_delta(section.text, section.end)
            self.reasoning_tokens += is_thought * len(delta.tokens)
            return [delta]
        self.reasoning_tokens += is_thought * self._drop_inside(section.end)
        is_shown = is_thought and self._reasoning_format is ReasoningFormat.SEPARATE
        return [ReasoningDelta(self._index, section.text)] if is_shown else []

    def _call_events(self, section: AnswerSection) -> list[Event]:
        self._drop_inside(section.end)
        events: list[Event] = []
        for pieces in _by_call(section.pieces):
            if pieces[0].name is not None and (self._repeats.is_repeated or (self._one_call and self._calls)):
                self._has_its_call = True
                return events
            passed = self._repeats.add(pieces[0].name, "".join(piece.arguments for piece in pieces))
            if passed is not None and passed != (None, ""):
                events.append(self._call_delta(*passed))
        self._call_was_cut |= section.kind is SectionKind.CUT_CALL and not self._repeats.is_held
        self._has_its_call = section.is_end and (self._one_call or self._repeats.is_repeated)
        if not self._repeats.is_held:
            self._calls_end = section.end
        return events

    def _call_delta(self, name: str | None, arguments: str) -> ToolCallDelta:
        self._calls += name is not None
        id = new_call_id() if name is not None else None
        return ToolCallDelta(self._index, self._calls - 1, id, name, arguments)

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
        if self._is_over or self._calls or all(sampled.logprob is None for sampled in self._waiting):
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


@dataclass(slots=True)
class _Sampled:
    """A token whose text, characters [start, end) of the stream, has not been passed on yet."""

    token: int
    logprob: TokenLogprob | None
    start: int
    end: int


@dataclass(slots=True)
class _RepeatedCalls:
    """One answer's calls, piece by piece, of which none passes that is the one before it again: a small model that
    was made to call a tool likes to write the same call over and over. Without `is_watching` everything passes."""

    is_watching: bool
    _before: tuple[str, str] | None = None
    _latest: tuple[str, str] | None = None
    is_held: bool = False
    """Nothing of the latest call has passed yet: so far it is the one before it."""

    def add(self, name: str | None, arguments: str) -> tuple[str | None, str] | None:
        """A piece of a call, with its name if it begins there: what passes of it and of what was held before."""
        if not self.is_watching:
            return name, arguments
        if name is not None:
            self._before, self._latest = self._latest, (name, "")
            self.is_held = self._before is not None and self._before[0] == name
        assert self._latest is not None
        self._latest = self._latest[0], self._latest[1] + arguments
        if not self.is_held:
            return name, arguments
        assert self._before is not None
        self.is_held = self._before[1].startswith(self._latest[1])
        return None if self.is_held else self._latest

    @property
    def is_repeated(self) -> bool:
        """The latest call, if it is over, is the one before it."""
        return self.is_held and self._latest == self._before


def read_answer(vocab: Vocab, request: Request, prompt: str, ids: Iterable[int]) -> Message:
    """A whole answer as the model wrote it, whatever of it the client was shown. Its calls have no ids."""
    hidden = hidden_tokens(vocab)
    text = b"".join(vocab.pieces[token] for token in ids if token not in hidden).decode("utf-8", "replace")
    tools = {tool.name: tool for tool in request.tools}
    sections = Sections(tools, open_reasoning(prompt), framing(vocab)).read_whole(text)
    calls = [
        ToolCall("", pieces[0].name or "", "".join(piece.arguments for piece in pieces))
        for pieces in _by_call(pieces_of(sections))
    ]
    content, reasoning = (text_of(sections, kind) for kind in (SectionKind.TEXT, SectionKind.REASONING))
    return Message("assistant", content, reasoning, tuple(calls))


def open_reasoning(prompt: str) -> Reasoning | None:
    """The block that the prompt itself has opened, if it ends with a start marker."""
    prompt = prompt[-80:].rstrip()
    return next((block for block in REASONING if prompt.endswith(block.start)), None)


def framing(vocab: Vocab) -> tuple[str, ...]:
    """Strings that a model of this vocabulary writes around its messages, and that are no part of them."""
    return HARMONY if "<|channel|>" in vocab.specials else ()


def hidden_tokens(vocab: Vocab) -> frozenset[int]:
    """Tokens that are not part of the text: control tokens, except those that are markers of a dialect."""
    texts = MARKER_TOKENS | HARMONY_TOKENS if framing(vocab) else MARKER_TOKENS
    return (vocab.controls - {vocab.specials[text] for text in texts if text in vocab.specials}) | vocab.eog


# ── where the text of an answer ends before the model ends it ──

_BLANKS = " \t"


class StopScanner:
    """Passes text on as soon as it cannot be the beginning of a stop string any more.

    The first stop string to be complete wins, so the outcome does not depend on how the text was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops if stop]
        self._firsts = frozenset(automaton.word[0] for automaton in self._automata)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be passed on, and the stop string that was completed right after it."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            for automaton in self._automata:
                if automaton.step(char):
                    self._held = ""
                    return pending[: end - len(automaton.word)], automaton.word
        keep = max(automaton.matched for automaton in self._automata)
        passed = pending[: len(pending) - keep]
        self._held = pending[len(passed) :]
        return passed, None

    def flush(self) -> str:
        """What is still held back: the text has ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth-Morris-Pratt: the text ends with the first `matched` characters of `word`, and no more."""

    __slots__ = ("_fallback", "matched", "word")

    def __init__(self, word: str) -> None:
        self.word = word
        self.matched = 0
        self._fallback = _fallbacks(word)

    def step(self, char: str) -> bool:
        """Read one character; True when the word is complete."""
        while self.matched and self.word[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.word[self.matched] == char
        return self.matched == len(self.word)


def _fallbacks(word: str) -> list[int]:
    """For every beginning of `word`: the length of its longest proper border."""
    fallback = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = fallback[length - 1]
        length += word[i] == word[length]
        fallback[i] = length
    return fallback


class LineLimit:
    """For editors, which want the rest of a block, and want it soon. Reads the text of one answer as it comes."""

    def __init__(self, seconds: float | None, indent: int) -> None:
        """The answer ends with the first line that ends later than `seconds` after its first text, and before one
        that begins with fewer than `indent` blanks."""
        self._seconds = seconds
        self._indent = indent
        self._began: float | None = None
        self._blanks: int | None = None
        """At the beginning of the line, so far; None: something else has come, or it is the first line."""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that belongs to the answer, and whether the answer ends with it."""
        if self._began is None:
            self._began = monotonic()
        if self._indent:
            for place, char in enumerate(text):
                if self._is_outside(char):
                    return text[:place], True
        is_late = self._seconds is not None and "\n" in text and monotonic() - self._began > self._seconds
        return text, is_late

    def _is_outside(self, char: str) -> bool:
        """Whether this character shows that its line is not indented enough."""
        if self._blanks is not None:
            if char in _BLANKS:
                self._blanks += 1
                return False
            if self._blanks < self._indent:
                return True
            self._blanks = None
        if char == "\n":
            self._blanks = 0
        return False
