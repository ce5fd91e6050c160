"""`emberkeep`: the commands, and how their errors reach a person."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from emberkeep import __version__
from emberkeep.cli.bench import app as bench_app
from emberkeep.cli.chat import chat
from emberkeep.cli.common import (
    ApiKeyFlag,
    ConfigFlag,
    CtxFlag,
    DataDirFlag,
    DiskBudgetFlag,
    HostFlag,
    ModelFlag,
    ParallelFlag,
    PortFlag,
    RamBudgetFlag,
    ThreadsFlag,
    complain,
    install_model,
    load_config,
)
from emberkeep.cli.config import app as config_app
from emberkeep.cli.doctor import doctor
from emberkeep.cli.models import app as models_app
from emberkeep.errors import EmberkeepError

EXAMPLES = """\b
Examples:
  emberkeep serve                              OpenAI-compatible server on http://127.0.0.1:8080
  emberkeep serve --model qwen2.5-7b --ctx 32768
  emberkeep chat                               talk to the default model in this terminal
  emberkeep models pull hf:owner/repo/file.gguf
  emberkeep doctor                             is everything in place?
  emberkeep config show                        every setting and where its value came from

\b
Every flag is also a variable (EMBERKEEP_PORT=9000) and a key in emberkeep.toml (port = 9000).
"""

app = typer.Typer(
    name="emberkeep",
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
) -> None:
    pass


@app.command()
def serve(
    model: ModelFlag = None,
    host: HostFlag = None,
    port: PortFlag = None,
    data_dir: DataDirFlag = None,
    ctx: CtxFlag = None,
    parallel: ParallelFlag = None,
    ram_budget: RamBudgetFlag = None,
    disk_budget: DiskBudgetFlag = None,
    api_key: ApiKeyFlag = None,
    threads: ThreadsFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Answer OpenAI-compatible requests over HTTP until stopped.

    The default model is pulled first when it is missing.
    """
    settled = load_config(
        model=model,
        host=host,
        port=port,
        data_dir=data_dir,
        ctx=ctx,
        parallel=parallel,
        ram_budget=ram_budget,
        disk_budget=disk_budget,
        api_key=api_key,
        threads=threads,
        config=config,
    )
    # Imported late, as in every command: `emberkeep --help` must not load a web framework.
    from emberkeep.server.serve import serve as run

    run(settled, install=install_model)


app.command()(chat)
app.add_typer(models_app, name="models")
app.command()(doctor)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Exit status: 0 done, 1 an error that has been explained, 2 wrong usage, 130 interrupted."""
    try:
        app()
    except EmberkeepError as error:
        complain(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
