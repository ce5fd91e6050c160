"""`emberkeep chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from emberkeep.cli.chat_session import ChatSession, printable
from emberkeep.cli.common import (
    ApproximateFlag,
    AttentionFlag,
    BackendFlag,
    BaseUrlFlag,
    ConfigFlag,
    CpuMoeFlag,
    CtxFlag,
    DataDirFlag,
    DeviceFlag,
    DisableToolsFlag,
    DtypeFlag,
    EnableToolsFlag,
    EngineFlag,
    EvictFlag,
    ExactFlag,
    GpuLayersFlag,
    KvBitsFlag,
    KvTypeFlag,
    LoraFlag,
    RecallFlag,
    TensorSplitFlag,
    ToolsFlag,
    ToolsFromFlag,
    ToolsRootFlag,
    complain,
    install_model,
    load_config,
    open_model,
    setting_help,
    settings_among,
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
    from emberkeep.library.arguments import Options
    from emberkeep.library.tool_session import ToolSession

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
  emberkeep chat --tools-from mine.py          the model may call functions of yours
  emberkeep chat --disable-tools http          and none of these
  emberkeep chat --backend gpt,local           a model of `emberkeep api list`, the one here if it is down
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
    lora: LoraFlag = None,
    kv_type: KvTypeFlag = None,
    gpu_layers: GpuLayersFlag = None,
    cpu_moe: CpuMoeFlag = None,
    tensor_split: TensorSplitFlag = None,
    engine: EngineFlag = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    attention: AttentionFlag = None,
    kv_bits: KvBitsFlag = None,
    approximate: ApproximateFlag = None,
    exact: ExactFlag = None,
    evict: EvictFlag = None,
    recall: RecallFlag = None,
    tools: ToolsFlag = None,
    enable_tools: EnableToolsFlag = None,
    disable_tools: DisableToolsFlag = None,
    tools_from: ToolsFromFlag = None,
    tools_root: ToolsRootFlag = None,
    backend: BackendFlag = None,
    base_url: BaseUrlFlag = None,
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
    settled = load_config(**settings_among(locals()), parallel=1)
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
    # In a chat somebody is asked before a tool does harm: none runs behind it.
    with open_model(replace(config, server_tools=False)) as keeper, tools_of(keeper, config) as acting:
        journal = open_journal(keeper, config, is_saving=is_saving)
        session = ChatSession(
            keeper,
            conversation,
            options,
            sys.stdout,
            interactive=sys.stdin.isatty(),
            journal=journal,
            evicts=config.evict,
            acting=acting,
        )
        if session.interactive and (conversation.system or acting):
            _prewarm(keeper, conversation.system, acting)
        if saved is not None:
            journal.knows(saved)
            _remind(session, config, saved)
        session.run(_lines(config, session))


def _remind(session: ChatSession, config: Config, saved: SavedConversation) -> None:
    if not is_same_model(config, saved):
        session.aside(f"This conversation was with {Path(saved.model).name}; it goes on with another model.")
    if session.interactive:
        session.aside(printable(recap(session.conversation.turns)))


@contextmanager
def tools_of(keeper: Emberkeep, config: Config) -> Generator[ToolSession | None, None, None]:
    """Those of a chat with this model, which is asked only if it knows what tools are. Raises ConfigError."""
    if config.tools == "off" or (config.tools == "auto" and not keeper.card.calls_tools):
        if (config.enable_tools or config.tools_from or config.mcp) and config.tools == "auto":
            complain(
                "This model's chat template knows no tools, so it gets none: --tools on gives them all the same."
            )
        yield None
        return
    acting = keeper.acting(config, asks=sys.stdin.isatty())
    try:
        tokens, context = _tokens_of(acting), keeper.card.context
        if config.tools == "auto" and tokens > context // 2:
            complain(
                f"The tools would take about {tokens} of the {context} tokens of context, so there are none: "
                "--enable-tools takes fewer, a larger --ctx holds more."
            )
            yield None
        else:
            yield acting
    finally:
        acting.close()


def _tokens_of(acting: ToolSession) -> int:
    """About how many their definitions are."""
    return sum(len(json.dumps(asdict(tool))) for tool in acting.definitions()) // 4


def _prewarm(keeper: Emberkeep, system: str, acting: ToolSession | None) -> None:
    """Evaluate the system message and the tools while the user types. The first answer tells what goes wrong."""
    logging.getLogger("emberkeep.backend").setLevel(logging.ERROR)
    with suppress(EmberkeepError):
        tools = acting.definitions() if acting else ()
        keeper.keep_warm([Message("system", system)] if system else [], tools=tools or None)


def _lines(config: Config, session: ChatSession) -> Iterable[str]:
    if not session.interactive:
        return plain_lines(sys.stdin)
    session.aside(_greeting(session))
    return terminal_lines(config.data_dir / "chat-history")


def _greeting(session: ChatSession) -> str:
    card, health = session.keeper.card, session.keeper.health()
    who = card.id if health["backend"] == "local" else f"{card.id} ({health['backend']})"
    tools = f" · {len(session.acting.functions())} tools" if session.acting else ""
    return f"{who} · {card.context} tokens of context{tools} · /help"
