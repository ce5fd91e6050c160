"""A chat as it goes: lines in, answers and remarks out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TextIO

from emberkeep.cli.calls import CallView, ask_aloud
from emberkeep.cli.common import complain, console
from emberkeep.cli.conversation import Conversation
from emberkeep.cli.remarks import advice, archive_warning, stats_line
from emberkeep.cli.saved import Journal
from emberkeep.cli.slash import Quit, run_command
from emberkeep.errors import EmberkeepError
from emberkeep.types import (
    CallEnded,
    CallStarted,
    Event,
    Json,
    Message,
    PermissionAsked,
    ReasoningDelta,
    Recollection,
    TextDelta,
)

if TYPE_CHECKING:
    from emberkeep.library import Emberkeep, Result, Stream
    from emberkeep.library.arguments import Options
    from emberkeep.library.tool_session import ToolSession


_SILENCE = "…"
"""In place of an answer that did not come after the calls before it."""


class ChatSession:
    """Turns of one conversation. Answers go to `out`, remarks to stderr, so that a pipe gets answers only."""

    def __init__(
        self,
        keeper: Emberkeep,
        conversation: Conversation,
        options: Options,
        out: TextIO,
        *,
        interactive: bool,
        journal: Journal,
        evicts: bool = True,
        acting: ToolSession | None = None,
        ask: Callable[[str], str] = ask_aloud,
    ) -> None:
        """`acting`: with tools; `ask`: a person, who is there where `interactive`."""
        self.keeper = keeper
        self.conversation = conversation
        self.interactive = interactive
        self._options = options
        self._out = out
        self._journal = journal
        self._evicts = evicts
        self.acting = acting
        self._calls = CallView(acting, self.aside, ask)
        self._answered_by = ""

    def run(self, lines: Iterable[str]) -> None:
        """Until the lines end or the user quits. An error ends the session only when nobody is watching."""
        for line in lines:
            try:
                self._handle(line)
            except Quit:
                return
            except EmberkeepError as error:
                if not self.interactive:
                    raise
                complain(advice(error, evicts=self._evicts))

    def stats(self) -> Mapping[str, Json]:
        return self.keeper.stats()

    def search(self, query: str) -> list[Recollection]:
        return self._journal.search(query)

    def aside(self, text: str) -> None:
        self._out.flush()
        console(stderr=True).print(printable(text), style="dim", markup=False, soft_wrap=True)

    def say(self, *messages: Message) -> None:
        """As the user, who may have said more than one thing: get an answer. Raises EmberkeepError."""
        stream = self._stream([*self.conversation.messages, *messages])
        finished = self._show(stream)
        result = stream.result
        # A turn in which nothing happened is forgotten: many templates refuse two user messages in a row. What
        # tools have done is not: the model has to know of it.
        if result.text or result.exchanges:
            answer = Message("assistant", result.text or _SILENCE, result.reasoning)
            self.conversation.add(*messages, *result.exchanges, answer)
            self._journal.save(self.conversation)
        self.aside(self._stats_line(result) if finished else "stopped")
        self._say_who(result)
        if warning := archive_warning(result):
            complain(warning)

    def _stream(self, messages: list[Message]) -> Stream:
        options: Options = {**self._options, "conversation_id": self.conversation.id}
        if self.acting is None:
            return self.keeper.stream(messages, **options)
        from emberkeep.library.arguments import chat_request

        return self.acting.stream(chat_request(messages, None, options))

    def _say_who(self, result: Result) -> None:
        """Where another backend has stood in, and when the first one is back."""
        before, self._answered_by = self._answered_by, result.answered_by or self._answered_by
        chain = self.keeper.health().get("chain", [])
        first = chain[0] if chain else {}
        usual = before or first.get("name", "")
        if usual and result.answered_by not in ("", usual):
            failed = [link for link in chain if link.get("error") and link["name"] != result.answered_by]
            why = f" ({failed[0]['error']})" if failed else ""
            complain(f"{result.answered_by} has answered instead of {usual}{why}")

    def _handle(self, line: str) -> None:
        if line.startswith("/"):
            if told := run_command(self, line.rstrip()):
                self.aside(told)
        elif line.strip():
            self.say(Message("user", line.strip()))

    def _stats_line(self, result: Result) -> str:
        return stats_line(result, self._options.get("max_tokens"), self.keeper.card.context)

    def _show(self, stream: Stream) -> bool:
        """Whether the answer came to its end; Ctrl-C at a terminal stops it, and only it."""
        try:
            with stream:
                self._show_events(stream.events())
            return True
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            return False
        finally:
            self._write("\n")

    def _show_events(self, events: Iterable[Event]) -> None:
        thinking = is_open = False
        for event in events:
            if isinstance(event, ReasoningDelta):
                thinking = True
                self._write_dim(event.text)
            elif isinstance(event, TextDelta) and event.text:
                if thinking:
                    self._write_dim("\n\n")
                    thinking = False
                self._write(event.text)
                is_open = not event.text.endswith("\n")
            elif isinstance(event, CallStarted | CallEnded | PermissionAsked):
                if is_open:
                    self._write("\n")
                thinking = is_open = False
                self._calls.show(event)

    def _write(self, text: str) -> None:
        self._out.write(printable(text) if self._out.isatty() else text)
        self._out.flush()

    def _write_dim(self, text: str) -> None:
        if self._out.isatty():
            self._out.write(f"\033[2m{printable(text)}\033[0m")
            self._out.flush()


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Without control characters: what a model writes must not be able to drive the terminal."""
    return _CONTROL.sub("", text)
