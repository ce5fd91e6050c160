"""`emberkeep`: the commands, and how their errors reach a person."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from emberkeep import __version__
from emberkeep.cli.commands import Home, LogLevelFlag, VerboseFlag, lazy_group
from emberkeep.cli.console import complain
from emberkeep.errors import EmberkeepError
from emberkeep.signals import Leaving, ending_signals

EXAMPLES = """\b
Examples:
  emberkeep serve                              OpenAI-compatible server on http://127.0.0.1:8080
  emberkeep chat                               talk to the default model in this terminal
  emberkeep chat --continue                    go on with the latest conversation
  emberkeep launch claude                      a coding agent that uses the server
  emberkeep models pull hf:owner/repo/file.gguf --name mine
  emberkeep serve --model mine --ctx 32768     a model that was pulled before
  emberkeep ps                                 which models the server has loaded
  emberkeep serve --engine hf -m owner/repo    a repository of the Hugging Face hub, in PyTorch
  emberkeep cache ls                           which prompts are kept, where and for how long
  emberkeep memory search "my boat"            what was said about it, long ago
  emberkeep tools list                         what a model can do here
  emberkeep mcp list                           MCP servers of the settings, and whether they work
  emberkeep api add gpt openai                 a model that runs elsewhere, for `chat --backend gpt`
  emberkeep cluster serve --replicas 3         several servers as one, on Ray Serve
  emberkeep devices                            CPU and GPUs, and which of them a model would be put on
  emberkeep doctor                             is everything in place?
  emberkeep config show                        every setting and where its value came from
  emberkeep config trust                       use all that the emberkeep.toml of this folder says

\b
Settings can also be variables (EMBERKEEP_CTX=8192) and keys in emberkeep.toml (ctx = 8192).
"""

COMMANDS = {
    "serve": Home("emberkeep.cli.serve", "app", "Answer OpenAI-compatible requests over HTTP until stopped."),
    "chat": Home(
        "emberkeep.cli.chat", "app", "Talk to a model in this terminal; /help lists what can be done there."
    ),
    "launch": Home(
        "emberkeep.cli.launch", "app", "Start a client that is installed, set up for the server that runs here."
    ),
    "ps": Home("emberkeep.cli.serve", "ps_app", "Which models the running server has loaded, and for how long."),
    "stop": Home(
        "emberkeep.cli.serve",
        "stop_app",
        "Unload a model, when the requests that it answers are done; or stop the server.",
    ),
    "devices": Home(
        "emberkeep.cli.devices",
        "app",
        "What can compute on this machine: its CPU and its GPUs, as llama.cpp and PyTorch see them.",
    ),
    "doctor": Home(
        "emberkeep.cli.doctor",
        "app",
        "Check this machine and say what to do about what is missing. Exit status 1 only for a failure.",
    ),
    "models": Home("emberkeep.cli.models", "app", "List, pull, show and remove models."),
    "cache": Home(
        "emberkeep.cli.cache", "app", "Look at stored prompt state, pin it, remove it, ask why it was not used."
    ),
    "memory": Home(
        "emberkeep.cli.memory", "app", "Search what has left a conversation, keep facts, export, import, forget."
    ),
    "api": Home("emberkeep.cli.api", "app", "Register models that run somewhere else."),
    "tools": Home("emberkeep.cli.tools", "app", "List the tools that models can call, show one, run one."),
    "mcp": Home("emberkeep.cli.mcp", "app", "Use the tools of MCP servers, and be one."),
    "cluster": Home("emberkeep.cli.cluster", "app", "Several servers as one, on Ray Serve."),
    "config": Home("emberkeep.cli.config", "app", "Look at the settings, and trust a file that sets some."),
    "bench": Home(
        "emberkeep.cli.bench",
        "app",
        "Measure this machine. Leave it alone meanwhile.",
    ),
}

app = typer.Typer(
    name="emberkeep",
    cls=lazy_group(COMMANDS),
    help="A local LLM runtime that never evaluates a token twice.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"emberkeep {__version__}")
        raise typer.Exit


@app.callback()
def emberkeep(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: VerboseFlag = False,
    log_level: LogLevelFlag = None,
) -> None:
    pass


def main() -> None:
    run(app)


def run(app: Callable[[], object]) -> None:
    """Exit status: 0 done, 1 an error that has been explained, 2 wrong usage, 128 and a signal's number (130:
    interrupted)."""
    _leave_in_order()
    try:
        try:
            app()
        finally:
            # Here, not when Python ends: then it would be too late to explain what went wrong.
            sys.stdout.flush()
    except EmberkeepError as error:
        complain(str(error))
        sys.exit(1)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as error:
        complain(_explain(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _leave_in_order() -> None:
    """SIGTERM, and SIGHUP when the terminal closes, end a command as Ctrl-C does: with all that it has started."""

    def leave(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)  # who asks twice does not want to wait
        raise Leaving(128 + number)

    numbers = ending_signals()
    for number in numbers:
        if number != signal.SIGINT:
            signal.signal(number, leave)
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _explain(error: OSError) -> str:
    what = f"Cannot use {error.filename}" if error.filename else "Reading or writing failed"
    try:
        # What a large write could not put out is lost, and flushing alone would succeed then.
        if not error.filename:
            sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        what = "Cannot write the output"
        _drop_output()
    return f"{what}: {error.strerror or error}."


def _drop_output() -> None:
    # What is left in its buffer is written when Python ends, which would fail again, with a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
