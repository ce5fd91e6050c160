"""A chat as it goes: lines in, answers and remarks out, and the commands that begin with a slash."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, TextIO

from emberkeep.cli.chat_history import ChatHistory, Journal
from emberkeep.cli.console import align, complain, console, plural, printable
from emberkeep.cli.memory import NOTHING_FOUND, describe
from emberkeep.cli.tools import gist
from emberkeep.errors import ContextExceeded, EmberkeepError
from emberkeep.logs import LINES
from emberkeep.types.events import (
    CallEnded,
    CallStarted,
    Decision,
    Event,
    FinishReason,
    PermissionAsked,
    ReasoningDelta,
    TextDelta,
    ToolOutcome,
)
from emberkeep.types.request import Json, Message, ToolCall
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.library.arguments import Options
    from emberkeep.library.emberkeep import Emberkeep
    from emberkeep.library.results import Result, Stream
    from emberkeep.library.tool_session import ToolSession
    from emberkeep.mcp.answers import McpPrompt

_SILENCE = "…"
"""In place of an answer that did not come after the calls before it."""
_FULL = 0.9
_ARGUMENT_CHARS = 60
_CALL_CHARS = 160
_RESULT_CHARS = 100
_WHOLE = 10**6
_QUESTION = "Allow? [y]es, [n]o, [a]lways or ne[v]er in this session: "
_ANSWERS = {
    **dict.fromkeys(("y", "yes", "o", "once"), Decision.ONCE),
    **dict.fromkeys(("n", "no"), Decision.NO),
    **dict.fromkeys(("a", "always"), Decision.ALWAYS),
    **dict.fromkeys(("v", "never"), Decision.NEVER),
}


def ask_aloud(question: str) -> str:
    """On stderr: the output may be a pipe. Raises EOFError."""
    print(question, end="", file=sys.stderr, flush=True)
    return input()


@dataclass(frozen=True, slots=True)
class Terminal:
    """Where answers go, whether a person is there (`interactive`), and how that person is asked."""

    out: TextIO
    interactive: bool
    ask: Callable[[str], str] = ask_aloud


class ChatSession:
    """Turns of one conversation. Answers go to `out`, remarks to stderr: a pipe gets answers only."""

    def __init__(
        self,
        llm: Emberkeep,
        conversation: ChatHistory,
        options: Options,
        terminal: Terminal,
        journal: Journal,
        acting: ToolSession | None = None,
    ) -> None:
        """`acting`: with tools."""
        self.llm = llm
        self.conversation = conversation
        self.interactive = terminal.interactive
        self._options = options
        self._terminal = terminal
        self._out = terminal.out
        self.journal = journal
        self.acting = acting
        self._answered_by = ""

    def run(self, lines: Iterable[str]) -> None:
        """Until the lines end or the user quits. An error ends the session only where no person is watching."""
        for line in lines:
            try:
                self._handle(line)
            except Quit:
                return
            except EmberkeepError as error:
                if not self.interactive:
                    raise
                complain(advice(error, evicts=self._options.get("evict") is not False))

    def aside(self, text: str) -> None:
        self._out.flush()
        LINES.let_out()
        console(stderr=True).print(printable(text, ""), style="dim", markup=False, soft_wrap=True)

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
            self.journal.save(self.conversation)
        limit, context = self._options.get("max_tokens"), self.llm.card.context
        self.aside(stats_line(result, limit, context) if finished else "stopped")
        self._say_who(result)
        # What left the context should have been archived.
        if error := next((eviction.error for eviction in result.evictions if eviction.error), None):
            complain(f"What left the context was not archived: {error}")

    def _stream(self, messages: list[Message]) -> Stream:
        options: Options = {**self._options, "conversation_id": self.conversation.id}
        if self.acting is None:
            return self.llm.stream(messages, **options)
        from emberkeep.library.arguments import chat_request

        return self.acting.stream(chat_request(messages, None, options))

    def _say_who(self, result: Result) -> None:
        """Where another backend has stood in, and when the first one is back."""
        before, self._answered_by = self._answered_by, result.answered_by or self._answered_by
        chain = self.llm.health().get("chain", [])
        usual = before or (chain[0]["name"] if chain else "")
        if usual and result.answered_by not in ("", usual):
            failed = [link for link in chain if link.get("error") and link["name"] != result.answered_by]
            why = f" ({failed[0]['error']})" if failed else ""
            complain(f"{result.answered_by} has answered instead of {usual}{why}")

    def _handle(self, line: str) -> None:
        if line.startswith("/"):
            if reply := run_command(self, line.rstrip()):
                self.aside(reply)
        elif line.strip():
            self.say(Message("user", line.strip()))

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
            LINES.let_out()

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
                self._show_call(event)

    def _write(self, text: str) -> None:
        LINES.hold_back()
        self._out.write(printable(text, "") if self._out.isatty() else text)
        self._out.flush()

    def _write_dim(self, text: str) -> None:
        if self._out.isatty():
            LINES.hold_back()
            self._out.write(f"\033[2m{printable(text, '')}\033[0m")
            self._out.flush()

    def _show_call(self, event: CallStarted | CallEnded | PermissionAsked) -> None:
        """Blocks while the user decides."""
        if isinstance(event, CallStarted):
            self.aside(f"→ {call_line(event.call)}")
        elif isinstance(event, CallEnded):
            self.aside(f"  {_outcome_line(event.outcome)}")
            if event.outcome.remark:  # only those of other models have one
                self.aside(indent(event.outcome.text, "  "))
        else:
            self._decide(event.call)

    def _decide(self, call: ToolCall) -> None:
        """Where the question is interrupted nothing is decided: that ends the answer, and so the call."""
        self.aside(f"? {call_line(call, whole=True)}")
        decision = self._read_decision()
        if self.acting is not None:
            self.acting.decide(call, decision)

    def _read_decision(self) -> Decision:
        while True:
            try:
                answer = self._terminal.ask(_QUESTION).strip().lower()
            except EOFError:
                return Decision.NO
            if answer in _ANSWERS:
                return _ANSWERS[answer]


# ── tool calls, as they are shown while they happen ──


def call_line(call: ToolCall, *, whole: bool = False) -> str:
    """`read_file(path="notes.txt")`. `whole`: nothing is left out, for a user who has to decide."""
    try:
        given = json.loads(call.arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        given = None
    of_an_argument, of_all = (_WHOLE, _WHOLE) if whole else (_ARGUMENT_CHARS, _CALL_CHARS)
    if not isinstance(given, dict):
        return _short(f"{call.name}({call.arguments})", of_all)
    arguments = (
        f"{key}={_short(json.dumps(value, ensure_ascii=False), of_an_argument)}" for key, value in given.items()
    )
    return _short(f"{call.name}({', '.join(arguments)})", of_all)


def _outcome_line(outcome: ToolOutcome) -> str:
    took = f"{outcome.ms:.0f} ms" if outcome.ms < 1000 else f"{outcome.ms / 1e3:.1f} s"
    if outcome.failed:
        return f"✗ {_short(outcome.text, _RESULT_CHARS)} · {took}"
    result = _short(outcome.remark or outcome.text, _RESULT_CHARS) or "nothing"
    return f"✓ {result} · {took}"


def _short(text: str, chars: int) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= chars else f"{line[: chars - 2]} …"


# ── what is said about an answer, beside it ──


def stats_line(result: Result, max_tokens: int | None, context: int) -> str:
    return " · ".join(_remarks(result, max_tokens, context))


def _remarks(result: Result, max_tokens: int | None, context: int) -> Iterator[str]:
    usage = result.usage
    yield f"reused {usage.cached_tokens}/{usage.prompt_tokens} tokens"
    yield f"first token {result.ttft_ms:.0f} ms"
    yield f"{usage.completion_tokens} tokens at {result.timings.predicted_per_second:.0f}/s"
    if drafted := result.timings.draft_n:
        yield f"{result.timings.draft_n_accepted} of {drafted} drafted tokens accepted"
    if left := sum(eviction.messages for eviction in result.evictions):
        archived = " (archived)" if all(eviction.archived for eviction in result.evictions) else ""
        yield f"{plural(left, 'message', 'messages')} left the context{archived}"
    if result.recalled:
        yield f"recalled {result.recalled}"
    if result.finish_reason is FinishReason.LENGTH:
        if usage.completion_tokens == max_tokens:
            yield "cut at --max-tokens"
        elif result.exchanges and usage.total_tokens < _FULL * context:
            yield "cut after as many rounds of tools as there may be"
        else:
            yield f"the context of {context} tokens is full, /clear begins anew"


def advice(error: EmberkeepError, *, evicts: bool) -> str:
    """What is wrong, and what can be done about it in a chat."""
    if not isinstance(error, ContextExceeded):
        return str(error)
    too_much = f"The context holds {error.context} tokens and this would make it {error.prompt_tokens}: "
    if evicts:
        return f"{too_much}say it in fewer words, a larger --ctx holds more."
    return f"{too_much}/clear begins anew, a larger --ctx holds more, --too-long evict lets old messages leave."


# ── commands: a name, a line of help, a function of the chat and the rest of the line ──


class Quit(Exception):
    """The user has had enough."""


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    help: str
    run: Callable[[ChatSession, str], str]
    """Returns what to tell the user. Raises EmberkeepError."""


def run_command(chat: ChatSession, line: str) -> str:
    """Carry out a line beginning with a slash. Returns what to tell the user. Raises Quit, EmberkeepError."""
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        for prompt in _prompts(chat):
            if prompt.name == name:
                return _prompt(chat, prompt, argument)
        return f"There is no command /{name}: /help lists them; a message may begin with a slash after a space."
    return command.run(chat, argument.strip())


def _help(chat: ChatSession, argument: str) -> str:
    commands = align([(command.usage, command.help) for command in COMMANDS.values()])
    prompts = align([(usage_of(prompt), prompt.description) for prompt in _prompts(chat)])
    keys = ["Alt-Enter begins a new line; Ctrl-C stops an answer; Ctrl-D quits."]
    return "\n".join(commands + prompts + keys)


def _stats(chat: ChatSession, argument: str) -> str:
    return "\n".join(_flat(chat.llm.stats()))


def _flat(stats: Mapping[str, Json], prefix: str = "") -> Iterator[str]:
    for key, value in stats.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}: {value:,}" if type(value) is int else f"{prefix}{key}: {value}"


def _system(chat: ChatSession, argument: str) -> str:
    if argument:
        chat.conversation.system = argument
        return "The system message is set; it holds from the next message on."
    return chat.conversation.system or "There is no system message: /system TEXT sets one."


def _save(chat: ChatSession, argument: str) -> str:
    if not argument:
        return "Say where: /save talk.md or /save talk.json."
    path = Path(argument).expanduser()
    chat.conversation.save(path)
    return f"Saved {len(chat.conversation.messages)} messages to {path}."


def _memory(chat: ChatSession, argument: str) -> str:
    if not argument:
        return "Say what to look for: /memory the name of my boat."
    found = chat.journal.search(argument)
    return "\n".join(map(describe, found)) or NOTHING_FOUND


def _tools(chat: ChatSession, argument: str) -> str:
    if chat.acting is None:
        return "This chat has no tools: begin it with --tools on."
    from emberkeep.tools.toolbox import ALL, ToolPolicy

    named = ToolPolicy((argument or ALL,))
    rows = [
        (function.name, function.group, "asks first" if function.is_dangerous else "", gist(function.definition))
        for function in chat.acting.functions()
        if named.takes(function)
    ]
    servers = [
        f"{state.name}: {state.status}. {state.reason}".rstrip()
        for state in chat.acting.servers()
        if argument in ("", "mcp", state.name)
    ]
    nothing = f"There is no tool, group or server {argument!r}: /tools lists them." if argument else "No tools."
    return "\n".join(align(rows) + servers) or nothing


def _prompts(chat: ChatSession) -> Sequence[McpPrompt]:
    return chat.acting.prompts() if chat.acting else ()


def usage_of(prompt: McpPrompt) -> str:
    arguments = (f"{one.name}=…" if one.is_required else f"[{one.name}=…]" for one in prompt.arguments)
    return " ".join([f"/{prompt.name}", *arguments])


def _prompt(chat: ChatSession, prompt: McpPrompt, line: str) -> str:
    """Fill a server's prompt and say it."""
    assert chat.acting is not None
    chat.say(chat.acting.prompt(prompt.name, _arguments(prompt, line)))
    return ""


def _arguments(prompt: McpPrompt, line: str) -> dict[str, str]:
    """One alone needs no name. Raises EmberkeepError."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise EmberkeepError(f"{usage_of(prompt)}: {error}.") from error
    if len(prompt.arguments) == 1 and "=" not in line and words:
        return {prompt.arguments[0].name: " ".join(words)}
    given = dict(word.partition("=")[::2] for word in words)
    required = {one.name for one in prompt.arguments if one.is_required}
    if not required <= set(given) <= {one.name for one in prompt.arguments}:
        raise EmberkeepError(f"These arguments do not fit: write {usage_of(prompt)}.")
    return given


def _clear(chat: ChatSession, argument: str) -> str:
    chat.conversation.clear()
    return "A new conversation begins."


def _quit(chat: ChatSession, argument: str) -> str:
    raise Quit


COMMANDS: Mapping[str, Command] = {
    "help": Command("/help", "this list", _help),
    "stats": Command("/stats", "what was evaluated, reused and stored", _stats),
    "system": Command("/system [TEXT]", "show or set the system message", _system),
    "save": Command("/save PATH", "write the conversation as .md or .json", _save),
    "memory": Command("/memory QUERY", "search what has left the context, now or before", _memory),
    "tools": Command("/tools [NAME]", "what the model can do here", _tools),
    "clear": Command("/clear", "begin a new conversation", _clear),
    "quit": Command("/quit", "leave", _quit),
}
