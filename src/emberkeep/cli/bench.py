"""`emberkeep bench`: how fast this machine is with stored state, and beside a llama-server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Argument, BadParameter, Option, Typer
from typer.core import TyperCommand

from emberkeep import __version__
from emberkeep.cli.commands import ConfigFlag, ModelFlag, logged, settle
from emberkeep.cli.console import console, show, show_facts
from emberkeep.cli.model_setup import install_model
from emberkeep.config.settings import Config
from emberkeep.types.request import Json
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.bench.report import BenchResult
    from emberkeep.bench.workspace import Workspace

KINDS = {
    "restart": "time to the first token of a long prompt: nothing stored, and after a crash",
    "turns": "eight turns of a conversation: time to the first token and reuse of each",
    "load": "tokens per second of one client and of eight, and first tokens among eight",
    "start": "from the start of a server to its first token; with --peer beside a llama-server",
    "peers": "the same model in our server and in a llama-server (--peer PATH), in turns",
}
ALL = ("restart", "turns", "load", "start")
_MOVED = ("accuracy", "cluster", "hosts", "replay", "shared", "speculation")
_REMOVED = {
    **{name: f"run `make bench ARGS={name}` from a checkout." for name in _MOVED},
    **dict.fromkeys(("report", "--plot"), "--json FILE, and `python -m benchmarks.plot FILE` in a checkout."),
}
_FACTS = ("python", "platform", "packages", "llama.cpp", "cpu", "gpu", "memory", "speed")  # of the doctor


class _BenchCommand(TyperCommand):
    """Refuses what other kinds and flags were called once, before it reads the others."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for name in args:
            if name in _REMOVED and (name.startswith("-") or name == args[0]):
                raise BadParameter(f"{name} was removed: {_REMOVED[name]}")
        return super().parse_args(ctx, args)


app = Typer(add_completion=False, rich_markup_mode=None)
HELP = "\n".join(
    [
        "Measure this machine. Leave it alone meanwhile.\n\n\b",
        *(f"{kind:<9}{about}" for kind, about in KINDS.items()),
        f"all      {', '.join(ALL)}",
    ]
)


@app.command(cls=_BenchCommand, help=HELP, no_args_is_help=True)
@logged
def bench(
    kinds: Annotated[list[str], Argument(metavar="KIND", help="What to measure, one after the other.")],
    model: ModelFlag = None,
    tokens: Annotated[
        list[int] | None, Option("--tokens", min=128, help="Prompt length; may be given several times.")
    ] = None,
    peer: Annotated[
        Path | None,
        Option("--peer", exists=True, dir_okay=False, resolve_path=True, help="The llama-server to compare with."),
    ] = None,
    repeat: Annotated[int | None, Option("--repeat", min=1, help="Rounds of everything that is timed.")] = None,
    data_dir: Annotated[
        Path | None,
        Option(
            "--data-dir",
            help="Folder on the disk to measure; a subfolder of it is used and removed (default: temporary).",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, Option("--json", help="Write every sample, the machine and the versions to this file.")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Small sizes: does it run? The numbers mean little.")] = False,
    config: ConfigFlag = None,
) -> None:
    names = [name for kind in kinds for name in (ALL if kind == "all" else (kind,))]
    for name in names:
        if name not in KINDS:
            raise BadParameter(f"there is no {name}: choose {', '.join(KINDS)} or all.")
    given = {"tokens": tuple(tokens or ()), "peer": peer, "repeat": repeat}
    chosen = {name: value for name, value in given.items() if value}
    benchmarks = [Benchmark.load(name, f"emberkeep.bench.{name}", chosen, quick=quick) for name in names]
    for name in chosen:
        if not any(name in benchmark.flags for benchmark in benchmarks):
            raise BadParameter(f"--{name} does not belong to {' or '.join(names)}.")
    run_all(benchmarks, settle(model=model, config=config).config, data_dir, json_file)


# ── running and printing, for benchmarks/ too ──


@dataclass(frozen=True, slots=True)
class Benchmark:
    name: str
    module: Any
    """Its `run` measures, with the plan that its parameter `plan` is annotated with."""
    plan: Any

    @classmethod
    def load(cls, name: str, module: str, flags: dict[str, Any], *, quick: bool) -> Benchmark:
        """`flags` are fields of plans, perhaps of others; they win over `quick`. Raises BadParameter."""
        home = import_module(module)
        kind = get_type_hints(home.run)["plan"]
        own = {field.name: flags[field.name] for field in fields(kind) if field.name in flags}
        try:
            plan = kind(**own)
        except TypeError as error:  # a field without a default
            missing = str(error).rpartition(": ")[2].strip("'").replace("_", "-")
            raise BadParameter(f"{name} needs --{missing}.") from error
        return cls(name, home, replace(plan.quick(), **own) if quick else plan)

    @property
    def flags(self) -> set[str]:
        return {field.name for field in fields(self.plan)}


def run_all(
    benchmarks: Sequence[Benchmark], config: Config, data_dir: Path | None, json_file: Path | None
) -> None:
    """Measures, prints and writes. Blocks for minutes. Raises EmberkeepError, OSError."""
    from emberkeep.bench.report import render
    from emberkeep.bench.workspace import open_workspace

    if json_file is not None:
        # Tried before anything is measured: an hour's figures need a place to go.
        json_file.open("a").close()
    facts, results = _surroundings(config), []
    with open_workspace(data_dir, _say, lambda: _model_file(config)) as workspace:
        for benchmark in benchmarks:
            _say(benchmark.name)
            results.append(asyncio.run(benchmark.module.run(workspace, benchmark.plan)))
            show(*render(results[-1]))
            if json_file is not None:
                # After every benchmark: an hour of measuring must not be lost to a Ctrl-C in the last one.
                json_file.write_text(json.dumps(_report(results, facts, workspace), indent=2) + "\n")


def _surroundings(config: Config) -> dict[str, Json]:
    """Also printed: figures of a benchmark will be quoted, and say nothing without the machine."""
    from emberkeep.cli.doctor import CHECKS

    machine = {name: CHECKS[name](config).text for name in _FACTS}
    show_facts(machine.items())
    when = datetime.now(UTC).isoformat(timespec="seconds")
    versions = {"emberkeep": __version__, "when": when, "command": sys.argv[1:]}
    return {**versions, "machine": machine, "cores": os.cpu_count(), "load_average": list(os.getloadavg())}


def _report(results: Sequence[BenchResult], facts: dict[str, Json], workspace: Workspace) -> dict[str, Json]:
    model = vars(workspace).get("model")  # None: no benchmark needed one
    return {**facts, "model": model and str(model), "results": [result.json() for result in results]}


def _model_file(config: Config) -> Path:
    """The file of the configured model, which is pulled first when it is the default one and missing."""
    from emberkeep.models.library import ModelLibrary

    install_model(config)
    return ModelLibrary(config.data_dir / "models").resolve(config.local_model).path


def _say(what: str) -> None:
    console(stderr=True).print(f"… {what}", style="dim", markup=False)
