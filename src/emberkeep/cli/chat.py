"""`emberkeep chat`: a conversation in the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from emberkeep.cli.chat_session import ChatSession, printable
from emberkeep.cli.common import (
    ApproximateFlag,
    AttentionFlag,
    ConfigFlag,
    CtxFlag,
    DataDirFlag,
    DeviceFlag,
    DtypeFlag,
    EngineFlag,
    EvictFlag,
    ExactFlag,
    GpuLayersFlag,
    KvBitsFlag,
    RecallFlag,
    install_model,
    load_config,
    open_model,
    setting_help,
)
from emberkeep.cli.conversation import Conversation
from emberkeep.cli.lines import plain_lines, terminal_lines
from emberkeep.cli.saved import (
    LATEST,
    export_saved,
    find_saved,
    is_same_model,
    list_saved,
    open_journal,
    recap,
    with_its_model,
)
from emberkeep.config import Config
from emberkeep.errors import EmberkeepError
from emberkeep.types import Message, Sampling, SavedConversation

if TYPE_CHECKING:
    from emberkeep.library import Emberkeep
    from emberkeep.library.requests import Options

_DEFAULTS = Sampling()

ModelArgument = Annotated[str | None, typer.Argument(help=setting_help("model"), show_default=False)]
SystemFlag = Annotated[str, typer.Option("--system", "-s", help="System message to begin with.")]
TemperatureFlag = Annotated[
    float, typer.Option("--temperature", "-t", min=0, help="0 always takes the likeliest token.")
]
MaxTokensFlag = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")]
ContinueFlag = Annotated[
    str | None,
    typer.Option("--continue", "-c", metavar="[ID]", help="Go on with the latest conversation, or with this one."),
]
ListFlag = Annotated[bool, typer.Option("--list", help="List the saved conversations, and no more.")]
ExportFlag = Annotated[
    tuple[str, Path] | None,
    typer.Option("--export", metavar="ID FILE", help="Write a saved one to a new .md or .json file, and no more."),
]
SaveFlag = Annotated[bool, typer.Option("--save/--no-save", help="Save this conversation for --continue.")]

EXAMPLES = """\b
Examples:
  emberkeep chat                               a new conversation
  emberkeep chat --list                        those before it
  emberkeep chat --continue                    go on with the latest
  emberkeep chat --continue 3f2a               or with another one; ids may be abbreviated
  emberkeep chat --export 3f2a talk.md         take one along
  echo "Why is the sky blue?" | emberkeep chat --no-save
"""


class ChatCommand(TyperCommand):
    """Lets `--continue` stand without an id."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spelled = [
            f"--continue={LATEST}" if arg in ("--continue", "-c") and following.startswith("-") else arg
            for arg, following in pairwise([*args, "-"])
        ]
        return super().parse_args(ctx, spelled)


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
    evict: EvictFlag = None,
    recall: RecallFlag = None,
    continued: ContinueFlag = None,
    save: SaveFlag = True,
    list_all: ListFlag = False,
    export: ExportFlag = None,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Talk to a model in this terminal; /help lists what can be done there.

    Lines from a pipe work too. When the context is full the oldest messages leave it, and are archived:
    `emberkeep memory search` finds them, and so does the model.
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
        evict=evict,
        recall=recall,
        data_dir=data_dir,
        config=config,
        parallel=1,
    )
    if list_all:
        list_saved(settled)
    elif export is not None:
        export_saved(settled, *export)
    else:
        saved = find_saved(settled, continued) if continued else None
        if saved is not None and model is None:
            settled = with_its_model(settled, saved)
        talk(settled, saved, system, {"temperature": temperature, "max_tokens": max_tokens}, is_saving=save)


def talk(
    config: Config, saved: SavedConversation | None, system: str, options: Options, *, is_saving: bool
) -> None:
    """Until the user leaves. Raises EmberkeepError."""
    install_model(config)
    conversation = Conversation.continued(saved, system) if saved else Conversation(system)
    # What could not be archived is said below the answer, and once.
    logging.getLogger("emberkeep.session").setLevel(logging.ERROR)
    with open_model(config) as keeper:
        journal = open_journal(keeper, config, is_saving=is_saving)
        session = ChatSession(
            keeper,
            conversation,
            options,
            sys.stdout,
            interactive=sys.stdin.isatty(),
            journal=journal,
            evicts=config.evict,
        )
        if session.interactive and conversation.system:
            _prewarm(keeper, conversation.system)
        if saved is not None:
            journal.knows(saved)
            _remind(session, config, saved)
        session.run(_lines(config, session))


def _remind(session: ChatSession, config: Config, saved: SavedConversation) -> None:
    if not is_same_model(config, saved):
        session.aside(f"This conversation was with {Path(saved.model).name}; it goes on with another model.")
    if session.interactive:
        session.aside(printable(recap(session.conversation.turns)))


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
