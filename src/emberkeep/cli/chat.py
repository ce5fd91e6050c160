"""`emberkeep chat`: a conversation in the terminal."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from emberkeep.cli.common import (
    ApproximateFlag,
    AttentionFlag,
    ConfigFlag,
    CtxFlag,
    DataDirFlag,
    DeviceFlag,
    DtypeFlag,
    EngineFlag,
    ExactFlag,
    GpuLayersFlag,
    KvBitsFlag,
    complain,
    console,
    install_model,
    load_config,
    open_model,
    setting_help,
)
from emberkeep.cli.conversation import Conversation
from emberkeep.cli.lines import plain_lines, terminal_lines
from emberkeep.cli.slash import Quit, run_command
from emberkeep.config import Config
from emberkeep.errors import ContextExceeded, EmberkeepError
from emberkeep.types import Event, FinishReason, Json, Message, ReasoningDelta, Sampling, TextDelta

if TYPE_CHECKING:
    from emberkeep.library import Emberkeep, Result, Stream
    from emberkeep.library.requests import Options

_DEFAULTS = Sampling()

ModelArgument = Annotated[str | None, typer.Argument(help=setting_help("model"), show_default=False)]
SystemFlag = Annotated[str, typer.Option("--system", "-s", help="System message to begin with.")]
TemperatureFlag = Annotated[
    float, typer.Option("--temperature", "-t", min=0, help="0 always takes the likeliest token.")
]
MaxTokensFlag = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")]


def chat(
    model: ModelArgument = None,
    system: SystemFlag = "",
    temperature: TemperatureFlag = _DEFAULTS.temperature,
    max_tokens: MaxTokensFlag = 1024,
    ctx: CtxFlag = None,
    gpu_layers: GpuLayersFlag = None,
    engine: EngineFlag = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    attention: AttentionFlag = None,
    kv_bits: KvBitsFlag = None,
    approximate: ApproximateFlag = None,
    exact: ExactFlag = None,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Talk to a model in this terminal; /help lists what can be done there.

    Lines from a pipe work too: echo "Why is the sky blue?" | emberkeep chat
    """
    settled = load_config(
        model=model,
        ctx=ctx,
        gpu_layers=gpu_layers,
        engine=engine,
        device=device,
        dtype=dtype,
        attention=attention,
        kv_bits=kv_bits,
        approximate=approximate,
        exact=exact,
        data_dir=data_dir,
        config=config,
        parallel=1,
    )
    install_model(settled)
    options: Options = {"temperature": temperature, "max_tokens": max_tokens}
    with open_model(settled) as keeper:
        session = ChatSession(keeper, Conversation(system), options, sys.stdout, interactive=sys.stdin.isatty())
        if session.interactive and system:
            _prewarm(keeper, system)
        session.run(_lines(settled, session))


def _prewarm(keeper: Emberkeep, system: str) -> None:
    """Evaluate the system message while its author reads and types. What goes wrong the first answer will tell."""
    logging.getLogger("emberkeep.backend").setLevel(logging.ERROR)
    with suppress(EmberkeepError):
        keeper.keep_warm([Message("system", system)])


def _lines(config: Config, session: ChatSession) -> Iterable[str]:
    if not session.interactive:
        return plain_lines(sys.stdin)
    session.aside(f"{session.keeper.card.id} · {session.keeper.card.context} tokens of context · /help")
    return terminal_lines(config.data_dir / "chat-history")


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
    ) -> None:
        self.keeper = keeper
        self.conversation = conversation
        self.interactive = interactive
        self._options = options
        self._out = out

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
                complain(_advice(error))

    def stats(self) -> Mapping[str, Json]:
        return self.keeper.stats()

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
        stream = self.keeper.stream([*self.conversation.messages, user], **self._options)
        finished = self._show(stream)
        result = stream.result
        # A turn without an answer is forgotten: many templates refuse two user messages in a row.
        if result.text:
            self.conversation.add(user, Message("assistant", result.text, result.reasoning))
        self.aside(self._stats_line(result) if finished else "stopped")

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


def stats_line(result: Result, max_tokens: int | None, context: int) -> str:
    usage, timings = result.usage, result.timings
    line = (
        f"reused {usage.cached_tokens}/{usage.prompt_tokens} tokens · first token {result.ttft_ms:.0f} ms · "
        f"{usage.completion_tokens} tokens at {timings.predicted_per_second:.0f}/s"
    )
    if result.finish_reason is not FinishReason.LENGTH:
        return line
    if usage.completion_tokens == max_tokens:
        return f"{line} · cut at --max-tokens"
    return f"{line} · the context of {context} tokens is full, /clear begins anew"


def _advice(error: EmberkeepError) -> str:
    if isinstance(error, ContextExceeded):
        return (
            f"The context holds {error.context} tokens and this would make it {error.prompt_tokens}: "
            "/clear begins anew, a larger --ctx holds more."
        )
    return str(error)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Without control characters: what a model writes must not be able to drive the terminal."""
    return _CONTROL.sub("", text)
