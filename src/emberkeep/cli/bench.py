"""`emberkeep bench`: how fast this machine is with stored state, against what is possible on it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emberkeep.cli.common import ConfigFlag, ModelFlag, console, install_model, load_config

if TYPE_CHECKING:
    from emberkeep.bench.report import Result
    from emberkeep.bench.stage import Stage

    Workload = Callable[[Stage], Awaitable[Result]]

PIPE_WIDTH = 1000

app = typer.Typer(
    help="Measure this machine: restarts, turns, sharing, overhead, load. Leave it alone meanwhile.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

BenchDirFlag = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", help="Folder on the disk to measure; what is stored in it is removed (default: temporary)."
    ),
]
RepeatFlag = Annotated[int | None, typer.Option("--repeat", min=1, help="Rounds of everything that is timed.")]
JsonFileFlag = Annotated[
    Path | None, typer.Option("--json", help="Write every sample, the machine and the versions to this file.")
]
QuickFlag = Annotated[bool, typer.Option("--quick", help="Small sizes: does it run? The numbers mean little.")]
SizesFlag = Annotated[
    list[int] | None, typer.Option("--tokens", min=128, help="Prompt length; may be given several times.")
]
SessionsFlag = Annotated[
    list[int] | None, typer.Option("--sessions", min=1, help="Number of sessions; may be given several times.")
]
PrefixFlag = Annotated[int | None, typer.Option("--prefix", min=1, help="Tokens of the shared prefix.")]


@app.command()
def restart(
    model: ModelFlag = None,
    tokens: SizesFlag = None,
    data_dir: BenchDirFlag = None,
    repeat: RepeatFlag = None,
    json_file: JsonFileFlag = None,
    quick: QuickFlag = False,
    config: ConfigFlag = None,
) -> None:
    """Time to first token in a fresh process: nothing stored, against resumed after a crash."""
    sizes = tuple(tokens) if tokens else None
    _run({"restart": _restart(repeat, quick, sizes)}, model, data_dir, json_file, config)


@app.command()
def turns(
    model: ModelFlag = None,
    data_dir: BenchDirFlag = None,
    repeat: RepeatFlag = None,
    json_file: JsonFileFlag = None,
    quick: QuickFlag = False,
    config: ConfigFlag = None,
) -> None:
    """Eight turns of a conversation: time to first token and reuse of each."""
    _run({"turns": _turns(repeat, quick)}, model, data_dir, json_file, config)


@app.command()
def shared(
    model: ModelFlag = None,
    sessions: SessionsFlag = None,
    prefix: PrefixFlag = None,
    data_dir: BenchDirFlag = None,
    json_file: JsonFileFlag = None,
    quick: QuickFlag = False,
    config: ConfigFlag = None,
) -> None:
    """Many sessions over one prefix: tokens evaluated and bytes stored for what is unique."""
    counts = tuple(sessions) if sessions else None
    _run({"shared": _shared(quick, counts, prefix)}, model, data_dir, json_file, config)


@app.command()
def miss(
    model: ModelFlag = None,
    data_dir: BenchDirFlag = None,
    repeat: RepeatFlag = None,
    json_file: JsonFileFlag = None,
    quick: QuickFlag = False,
    config: ConfigFlag = None,
) -> None:
    """What looking up and storing cost when nothing is reusable."""
    _run({"miss": _miss(repeat, quick)}, model, data_dir, json_file, config)


@app.command()
def load(
    model: ModelFlag = None,
    data_dir: BenchDirFlag = None,
    repeat: RepeatFlag = None,
    json_file: JsonFileFlag = None,
    quick: QuickFlag = False,
    config: ConfigFlag = None,
) -> None:
    """Eight clients at once, against a bare decode loop."""
    _run({"load": _load(repeat, quick)}, model, data_dir, json_file, config)


@app.command("all")
def everything(
    model: ModelFlag = None,
    data_dir: BenchDirFlag = None,
    repeat: RepeatFlag = None,
    json_file: JsonFileFlag = None,
    quick: QuickFlag = False,
    config: ConfigFlag = None,
) -> None:
    """All of them, one after the other."""
    workloads = {
        "restart": _restart(repeat, quick, None),
        "turns": _turns(repeat, quick),
        "shared": _shared(quick, None, None),
        "miss": _miss(repeat, quick),
        "load": _load(repeat, quick),
    }
    _run(workloads, model, data_dir, json_file, config)


# ── what the flags mean for each workload; imported late, as in every command ──


def _restart(repeat: int | None, quick: bool, sizes: tuple[int, ...] | None) -> Workload:
    from emberkeep.bench.restart import RestartPlan, run

    plan = _adjusted(RestartPlan(), quick, repeat=repeat, sizes=sizes)
    return lambda stage: run(stage, plan)


def _turns(repeat: int | None, quick: bool) -> Workload:
    from emberkeep.bench.turns import TurnsPlan, run

    plan = _adjusted(TurnsPlan(), quick, repeat=repeat)
    return lambda stage: run(stage, plan)


def _shared(quick: bool, sessions: tuple[int, ...] | None, prefix: int | None) -> Workload:
    from emberkeep.bench.shared import SharedPlan, run

    plan = _adjusted(SharedPlan(), quick, sessions=sessions, prefix_tokens=prefix)
    return lambda stage: run(stage, plan)


def _miss(repeat: int | None, quick: bool) -> Workload:
    from emberkeep.bench.miss import MissPlan, run

    plan = _adjusted(MissPlan(), quick, repeat=repeat)
    return lambda stage: run(stage, plan)


def _load(repeat: int | None, quick: bool) -> Workload:
    from emberkeep.bench.load import LoadPlan, run

    plan = _adjusted(LoadPlan(), quick, repeat=repeat)
    return lambda stage: run(stage, plan)


def _adjusted(plan: Any, quick: bool, **given: object) -> Any:
    """The plan with what was asked for; explicit flags win over --quick."""
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(plan.quick() if quick else plan, **chosen)


# ── running and printing ──


def _run(
    workloads: dict[str, Workload],
    model: str | None,
    data_dir: Path | None,
    json_file: Path | None,
    config: Path | None,
) -> None:
    from emberkeep.bench.machine import surroundings
    from emberkeep.bench.report import report_json
    from emberkeep.bench.stage import open_stage

    # A stopped benchmark must not leave servers and stores behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = []
    with open_stage(_model_file(model, config), data_dir, _say) as stage:
        around = surroundings(stage.model, stage.folder)
        for name, workload in workloads.items():
            _say(name)
            results.append(asyncio.run(_measured(workload, stage)))
            _print(results[-1])
            if json_file is not None:
                # After every workload: an hour of measuring must not be lost to a Ctrl-C in the last one.
                json_file.write_text(json.dumps(report_json(results, around), indent=2) + "\n")


async def _measured(workload: Workload, stage: Stage) -> Result:
    return await workload(stage)


def _model_file(model: str | None, config: Path | None) -> Path:
    """The file of the configured model, which is pulled first when it is the default one and missing."""
    from emberkeep.models.library import ModelLibrary

    settled = load_config(model=model, config=config)
    install_model(settled)
    return ModelLibrary(settled.data_dir / "models").resolve(settled.model).path


def _say(what: str) -> None:
    console(stderr=True).print(f"… {what}", style="dim", markup=False)


def _print(result: Result) -> None:
    from emberkeep.bench.tables import render

    output = console()
    if not output.is_terminal:
        # A pipe has no width: nothing may be folded or cut there.
        output.width = PIPE_WIDTH
    output.print()
    for part in render(result):
        output.print(part)
