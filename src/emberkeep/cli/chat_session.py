"""A chat as it goes: lines in, answers and remarks out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TextIO

from emberkeep.cli.common import complain, console
from emberkeep.cli.conversation import Conversation
from emberkeep.cli.remarks import advice, archive_warning, stats_line
from emberkeep.cli.saved import Journal
from emberkeep.cli.slash import Quit, run_command
from emberkeep.errors import EmberkeepError
from emberkeep.types import Event, Json, Message, ReasoningDelta, Recollection, TextDelta

if TYPE_CHECKING:
    from emberkeep.library import Emberkeep, Result, Stream
    from emberkeep.library.requests import Options


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
    ) -> None:
        self.keeper = keeper
        self.conversation = conversation
        self.interactive = interactive
        self._options = options
        self._out = out
        self._journal = journal
        self._evicts = evicts

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
        console(stderr=True).print(text, style="dim", markup=False, soft_wrap=True)

    def _handle(self, line: str) -> None:
        if line.startswith("/"):
            self.aside(run_command(self, line.rstrip()))
        elif line.strip():
            self._answer(line.strip())

    def _answer(self, text: str) -> None:
        user = Message("user", text)
        options: Options = {**self._options, "conversation_id": self.conversation.id}
        stream = self.keeper.stream([*self.conversation.messages, user], **options)
        finished = self._show(stream)
        result = stream.result
        # A turn without an answer is forgotten: many templates refuse two user messages in a row.
        if result.text:
            self.conversation.add(user, Message("assistant", result.text, result.reasoning))
            self._journal.save(self.conversation)
        self.aside(self._stats_line(result) if finished else "stopped")
        if warning := archive_warning(result):
            complain(warning)

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
        thinking = False
        for event in events:
            if isinstance(event, ReasoningDelta):
                thinking = True
                self._write_dim(event.text)
            elif isinstance(event, TextDelta) and event.text:
                if thinking:
                    self._write_dim("\n\n")
                    thinking = False
                self._write(event.text)

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
