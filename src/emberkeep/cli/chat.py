"""`emberkeep chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from emberkeep.cli.chat_history import (
    LATEST,
    ChatHistory,
    export_saved,
    find_saved,
    is_same_model,
    list_saved,
    open_journal,
    recap,
    with_its_model,
)
from emberkeep.cli.chat_session import ChatSession, Terminal
from emberkeep.cli.commands import one_command, with_settings
from emberkeep.cli.console import complain
from emberkeep.cli.model_setup import install_model, open_model
from emberkeep.config.kinds import is_model_name
from emberkeep.config.settings import DEFAULT_MODEL, OFF, Config, TooLong
from emberkeep.config.sources import LoadedConfig
from emberkeep.errors import EmberkeepError, ModelNotFound
from emberkeep.files import private_folder
from emberkeep.logs import is_verbose
from emberkeep.types.memory import SavedConversation
from emberkeep.types.request import Message, Sampling
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from prompt_toolkit.history import History

    from emberkeep.backend.running import RunningModel
    from emberkeep.library.arguments import Options
    from emberkeep.library.emberkeep import Emberkeep
    from emberkeep.library.tool_session import ToolSession

EXAMPLES = """\b
Examples:
  emberkeep chat                               a new conversation
  emberkeep chat mine                          with this model
  emberkeep chat "Why is the sky blue?"        one answer, and no more
  emberkeep chat --list                        those before it
  emberkeep chat --continue                    go on with the latest
  emberkeep chat --continue 3f2a               or with another one; ids may be abbreviated
  emberkeep chat --export 3f2a talk.md         take one along
  emberkeep chat --tools-from mine.py          the model may call functions of yours
  emberkeep chat --disable-tools http          and none of these
  emberkeep chat --backend gpt,local           a model of `emberkeep api list`, the one here if it is down
  echo "Why is the sky blue?" | emberkeep chat --no-save
"""


_NEARLY = 0.8
"""How much alike a word and the name of a model are, where the word is taken for that name, mistyped."""

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL] QUESTION", help="A model to talk to, and what to ask it.", show_default=False),
]


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    system: Annotated[str, typer.Option("--system", "-s", help="System message to begin with.")] = ""
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", min=0, help="0 always takes the likeliest token.")
    ] = Sampling().temperature
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")] = 1024
    own: Annotated[
        bool, typer.Option("--own", help="Load the model in this chat, though a server that runs here has it.")
    ] = False


@dataclass(frozen=True, slots=True)
class SavedFlags:
    continued: Annotated[
        str | None,
        typer.Option(
            "--continue", "-c", metavar="[ID]", help="Go on with the latest conversation, or with this one."
        ),
    ] = None
    save: Annotated[bool, typer.Option("--save/--no-save", help="Save this conversation for --continue.")] = True
    list_all: Annotated[bool, typer.Option("--list", help="List the saved conversations, and no more.")] = False
    export: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            "--export", metavar="ID FILE", help="Write a saved one to a new .md or .json file, and no more."
        ),
    ] = None


class ChatCommand(TyperCommand):
    """Lets `--continue` stand without an id."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        completed = [
            f"--continue={LATEST}" if arg in ("--continue", "-c") and following.startswith("-") else arg
            for arg, following in pairwise([*args, "-"])
        ]
        return super().parse_args(ctx, completed)


@with_settings(
    *("model", "backend", "ctx", "data_dir", "continued", "save", "list_all", "export", "config"),
    *("base_url", "lora", "kv_type", "speculation", "kv_bits", "approximate", "too_long", "recall", "tools"),
    *("enable_tools", "disable_tools", "tools_from", "tools_root", "engine", "flash_attention", "device", "dtype"),
    *("quantization", "attention", "residency", "gpu_memory", "gpu_layers", "cpu_moe", "tensor_split"),
)
def chat(*, loaded: LoadedConfig, words: Words = None, answers: AnswerFlags, saved: SavedFlags) -> None:
    """Talk to a model in this terminal; /help lists what can be done there.

    A server that runs here and has the model answers, unless a flag asks for what it was not started with. Lines
    from a pipe work too. When the context is full the oldest messages leave it, and are archived: `emberkeep
    memory search` finds them, and so does the model.
    """
    given = loaded.flags
    config, question = with_words(replace(loaded.config, parallel=1), words or [], is_named="model" in given)
    if saved.list_all:
        list_saved(config)
    elif saved.export is not None:
        export_saved(config, *saved.export)
    else:
        found = find_saved(config, saved.continued) if saved.continued else None
        if found is not None and config.model == loaded.config.model and "model" not in given:
            config = with_its_model(config, found)
        from emberkeep.cli.running_server import find_running_model

        running = None if answers.own else find_running_model(config, given)
        talk(config, found, answers, is_saving=saved.save, running=running, question=question)


def with_words(config: Config, words: Sequence[str], *, is_named: bool) -> tuple[Config, str]:
    """The first word names a model where there is one of that name, unless one is named already; all others are a
    question. Raises ModelNotFound for what is most probably a mistyped name."""
    from emberkeep.models.library import ModelLibrary

    if is_named or not words:
        return config, " ".join(words)
    first, rest = words[0], " ".join(words[1:])
    library = ModelLibrary(config.data_dir / "models")
    try:
        library.resolve(first)
    except ModelNotFound as error:
        names = (DEFAULT_MODEL, *(model.id for model in library.list()))
        is_path = not is_model_name(first) and not any(map(str.isspace, first))
        if first not in names and not is_path:
            if get_close_matches(first, names, cutoff=_NEARLY):
                raise error
            return config, " ".join(words)
    return replace(config, model=first), rest


def talk(
    config: Config,
    saved: SavedConversation | None,
    flags: AnswerFlags,
    *,
    is_saving: bool,
    running: RunningModel | None = None,
    question: str = "",
) -> None:
    """Until the user leaves, or the `question` is answered. `running`: the model, which a server has loaded.

    Raises EmberkeepError.
    """
    from emberkeep.library.emberkeep import Emberkeep

    if running is None:
        install_model(config)
    else:
        config = replace(config, model=running.card.id)
    conversation = ChatHistory.resume(saved, flags.system) if saved else ChatHistory(flags.system)
    options: Options = {
        "temperature": flags.temperature,
        "max_tokens": flags.max_tokens,
        "evict": config.too_long == TooLong.EVICT,
    }
    if not is_verbose():
        # What could not be archived is said below the answer, and once.
        logging.getLogger("emberkeep.session").setLevel(logging.ERROR)
    # In a chat a person is asked before a tool does harm, and says how long answers may be: no server does.
    own = replace(config, server_tools=OFF, max_tokens=None)
    with Emberkeep(running) if running else open_model(own) as llm, tools_of(llm, config) as acting:
        journal = open_journal(llm, config, is_saving=is_saving)
        is_talk = sys.stdin.isatty() and not question
        terminal = Terminal(sys.stdout, interactive=is_talk)
        session = ChatSession(llm, conversation, options, terminal, journal, acting)
        if session.interactive and (conversation.system or acting):
            _prewarm(llm, conversation.system, acting)
        if saved is not None:
            journal.knows(saved)
            _remind(session, config, saved)
        session.run([question] if question else _lines(config, session))


def _remind(session: ChatSession, config: Config, saved: SavedConversation) -> None:
    if not is_same_model(config, saved):
        session.aside(f"This conversation was with {Path(saved.model).name}; it goes on with another model.")
    if session.interactive:
        session.aside(recap(session.conversation.turns))


@contextmanager
def tools_of(llm: Emberkeep, config: Config) -> Generator[ToolSession | None, None, None]:
    """Those of a chat with this model, which is asked only if it knows what tools are. Raises ConfigError."""
    if config.tools == "off" or (config.tools == "auto" and not llm.card.calls_tools):
        if (config.enable_tools or config.tools_from or config.mcp) and config.tools == "auto":
            complain(
                "This model's chat template knows no tools, so it gets none: --tools on gives them all the same."
            )
        yield None
        return
    acting = llm.acting(config, asks=sys.stdin.isatty())
    try:
        # About how many their definitions are.
        tokens = sum(len(json.dumps(asdict(tool))) for tool in acting.definitions()) // 4
        context = llm.card.context
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


def _prewarm(llm: Emberkeep, system: str, acting: ToolSession | None) -> None:
    """Evaluate the system message and the tools while the user types. The first answer tells what goes wrong."""
    if not is_verbose():
        logging.getLogger("emberkeep.backend").setLevel(logging.ERROR)
    with suppress(EmberkeepError):
        tools = acting.definitions() if acting else ()
        llm.keep_warm([Message("system", system)] if system else [], tools=tools or None)


def _greeting(session: ChatSession) -> str:
    card, health = session.llm.card, session.llm.health()
    who = card.id if health["backend"] == "local" else f"{card.id} ({health['backend']})"
    tools = f" · {len(session.acting.functions())} tools" if session.acting else ""
    return f"{who} · {card.context} tokens of context{tools} · /help"


# ── where the user's messages come from: a terminal with editing and history, or any stream of lines ──


def _lines(config: Config, session: ChatSession) -> Iterable[str]:
    if not session.interactive:
        return (line.rstrip("\n") for line in sys.stdin)
    session.aside(_greeting(session))
    return terminal_lines(config.data_dir / "chat-history")


def terminal_lines(history: Path) -> Iterator[str]:
    """Messages typed at a prompt until Ctrl-D, or Ctrl-C twice. A pasted text is one message."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.patch_stdout import patch_stdout

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session: PromptSession[str] = PromptSession(history=_history(history), key_bindings=keys)
    interrupted = False
    while True:
        try:
            with patch_stdout(raw=True):  # what is logged meanwhile appears above the prompt
                line = session.prompt("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                return
            interrupted = True
            print("Ctrl-C again or Ctrl-D quits.")
            continue
        interrupted = False
        yield line


def _history(path: Path) -> History:
    """For this session only where the file cannot be written: a chat goes on without it."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        private_folder(path.parent)
        path.touch(mode=0o600)
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


app = one_command(chat, cls=ChatCommand, epilog=EXAMPLES)
