"""`emberkeep bench`: how fast this machine is with stored state, against what is possible on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import BadParameter, Option, Typer

from emberkeep.cli.common import ConfigFlag, DeviceFlag, ModelFlag, console, install_model, load_config
from emberkeep.cli.tables import show
from emberkeep.engine.extras import require_hf

if TYPE_CHECKING:
    from emberkeep.bench.report import Result
    from emberkeep.bench.stage import Folder

app = Typer(
    help="Measure this machine: restarts, turns, sharing, load, bits, stores, memory. Leave it alone meanwhile.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True, slots=True)
class Flags:
    """Every flag of every benchmark, in the order of `--help`; one that a benchmark does not have is not given."""

    model: ModelFlag = None
    tokens: Annotated[
        list[int] | None, Option("--tokens", min=128, help="Prompt length; may be given several times.")
    ] = None
    sessions: Annotated[
        list[int] | None, Option("--sessions", min=1, help="Number of sessions; may be given several times.")
    ] = None
    traces: Annotated[
        list[Path] | None,
        Option("--trace", exists=True, dir_okay=False, help="A recorded trace; may be given several times."),
    ] = None
    questions: Annotated[
        Path | None,
        Option("--questions", exists=True, dir_okay=False, help="Questions with passages (default: made up)."),
    ] = None
    prompts: Annotated[int | None, Option("--prompts", min=1, help="Number of prompts.")] = None
    chunks: Annotated[int | None, Option("--chunks", min=100, help="Chunks in the store.")] = None
    turns: Annotated[int | None, Option("--turns", min=100, help="Archived turns.")] = None
    searches: Annotated[int | None, Option("--searches", min=4, help="Searches that are timed.")] = None
    writes: Annotated[int | None, Option("--writes", min=1, help="Archived turns that are timed.")] = None
    prefix: Annotated[int | None, Option("--prefix", min=1, help="Tokens of the shared prefix.")] = None
    device: DeviceFlag = None
    layers: Annotated[int | None, Option("--layers", min=1, help="Layers of the random model.")] = None
    hidden: Annotated[int | None, Option("--hidden", min=8, help="Width of its layers.")] = None
    ctx: Annotated[int | None, Option("--ctx", min=128, help="Tokens of the context.")] = None
    times: Annotated[int | None, Option("--times", min=1, help="How many contexts the conversation fills.")] = None
    facts: Annotated[int | None, Option("--facts", min=1, max=100, help="Facts told and asked for.")] = None
    through: Annotated[
        Literal["http", "library"] | None, Option("--through", help="How to talk (default: http).")
    ] = None
    data_dir: Annotated[
        Path | None,
        Option(
            "--data-dir",
            help="Folder on the disk to measure; a subfolder of it is used and removed (default: temporary).",
        ),
    ] = None
    repeat: Annotated[int | None, Option("--repeat", min=1, help="Rounds of everything that is timed.")] = None
    json_file: Annotated[
        Path | None, Option("--json", help="Write every sample, the machine and the versions to this file.")
    ] = None
    quick: Annotated[bool, Option("--quick", help="Small sizes: does it run? The numbers mean little.")] = False
    config: ConfigFlag = None


@dataclass(frozen=True, slots=True)
class Workload:
    """A benchmark, and what it measures: `run` takes a stage (without a model, a folder) and the `plan`."""

    run: Callable[..., Coroutine[Any, Any, Result]]
    plan: Any
    needs_model: bool = True
    loads_model: bool = False
    """By itself, so that it may also be one that only transformers can read."""


COMMON = ("data_dir", "json_file", "quick")
WITH_MODEL = ("model", "config", *COMMON)


# ── what the flags mean for each workload; imported late, as in every command ──


def restart(flags: Flags) -> Workload:
    from emberkeep.bench.restart import RestartPlan, run

    return _planned(run, RestartPlan(), flags.quick, repeat=flags.repeat, sizes=flags.tokens)


def turns(flags: Flags) -> Workload:
    from emberkeep.bench.turns import TurnsPlan, run

    return _planned(run, TurnsPlan(), flags.quick, repeat=flags.repeat)


def shared(flags: Flags) -> Workload:
    from emberkeep.bench.shared import SharedPlan, run

    return _planned(run, SharedPlan(), flags.quick, sessions=flags.sessions, prefix_tokens=flags.prefix)


def miss(flags: Flags) -> Workload:
    from emberkeep.bench.miss import MissPlan, run

    return _planned(run, MissPlan(), flags.quick, repeat=flags.repeat)


def load(flags: Flags) -> Workload:
    from emberkeep.bench.load import LoadPlan, run

    return _planned(run, LoadPlan(), flags.quick, repeat=flags.repeat)


def store(flags: Flags) -> Workload:
    from emberkeep.bench.store import StorePlan, run

    planned = _planned(run, StorePlan(), flags.quick, repeat=flags.repeat, chunks=flags.chunks)
    return replace(planned, needs_model=False)


def memory(flags: Flags) -> Workload:
    from emberkeep.bench.memory import MemoryPlan, run

    given = {"turns": flags.turns, "searches": flags.searches, "writes": flags.writes}
    return replace(_planned(run, MemoryPlan(), flags.quick, **given), needs_model=False)


def bits(flags: Flags) -> Workload:
    from emberkeep.bench.bits import BitsPlan, run

    return _planned(run, BitsPlan(), flags.quick, prompts=flags.prompts)


def crowd(flags: Flags) -> Workload:
    from emberkeep.bench.crowd import CrowdPlan, run

    return replace(_planned(run, CrowdPlan(), flags.quick), needs_model=False)


def trace(flags: Flags) -> Workload:
    from emberkeep.bench.trace import TracePlan, run

    if not flags.traces:
        raise BadParameter("give at least one trace with --trace FILE.")
    return replace(_planned(run, TracePlan(), flags.quick, files=flags.traces), needs_model=False)


def hf_turns(flags: Flags) -> Workload:
    require_hf()
    from emberkeep.bench.hf_turns import run
    from emberkeep.bench.turns import TurnsPlan

    return replace(_planned(run, TurnsPlan(), flags.quick, repeat=flags.repeat), loads_model=True)


def rag(flags: Flags) -> Workload:
    require_hf()
    from emberkeep.bench.rag import RagPlan, run

    given = {"questions": flags.questions, "sizes": flags.tokens, "prompts": flags.prompts}
    return replace(_planned(run, RagPlan(), flags.quick, **given), loads_model=True)


def gpu(flags: Flags) -> Workload:
    require_hf()
    from emberkeep.bench.gpu import GpuPlan, run

    given = {"device": flags.device, "layers": flags.layers, "hidden": flags.hidden, "sizes": flags.tokens}
    return replace(_planned(run, GpuPlan(), flags.quick, repeat=flags.repeat, **given), needs_model=False)


def endless(flags: Flags) -> Workload:
    from emberkeep.bench.endless import EndlessPlan, run

    given = {"ctx": flags.ctx, "times": flags.times, "facts": flags.facts, "through": flags.through}
    return _planned(run, EndlessPlan(), flags.quick, **given)


def _planned(run: Callable[..., Any], plan: Any, quick: bool, **given: object) -> Workload:
    """The workload with what was asked for; explicit flags win over --quick."""
    chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if value}
    return Workload(run, replace(plan.quick() if quick else plan, **chosen))


# ── the commands ──


def _command(
    name: str,
    sentence: str,
    own: tuple[str, ...],
    *workloads: Callable[[Flags], Workload],
    common: tuple[str, ...] = WITH_MODEL,
) -> None:
    """Adds a command whose flags are the common ones and its `own`."""

    def command(**given: Any) -> None:
        flags = Flags(**given)
        _run({workload.__name__: workload(flags) for workload in workloads}, flags)

    known = signature(Flags, eval_str=True).parameters
    assert known.keys() >= {*common, *own}
    chosen = [flag for flag in known.values() if flag.name in common + own]
    # Typer finds out about options from a function's signature.
    command.__signature__ = Signature(chosen)  # type: ignore[attr-defined]
    app.command(name, help=sentence)(command)


_command(
    "restart",
    "Time to first token in a fresh process: nothing stored, against resumed after a crash.",
    ("tokens", "repeat"),
    restart,
)
_command("turns", "Eight turns of a conversation: time to first token and reuse of each.", ("repeat",), turns)
_command(
    "shared",
    "Many sessions over one prefix: tokens evaluated and bytes stored for what is unique.",
    ("sessions", "prefix"),
    shared,
)
_command("miss", "What looking up and storing cost when nothing is reusable.", ("repeat",), miss)
_command("load", "Eight clients at once, against a bare decode loop.", ("repeat",), load)
_command(
    "bits", "State in 16, 8 and 4 bits: its size, its speed, and what is left of an answer.", ("prompts",), bits
)
_command(
    "store",
    "A store with a hundred thousand chunks: opening it, and looking up a prompt.",
    ("repeat", "chunks"),
    store,
    common=COMMON,
)
_command(
    "memory",
    "A million archived turns: searching them, and archiving one more.",
    ("turns", "searches", "writes"),
    memory,
    common=COMMON,
)
_command(
    "crowd",
    "A hundred conversations over a budget that holds twenty: does it hold, and who is still there?",
    (),
    crowd,
    common=COMMON,
)
_command(
    "trace",
    "Recorded requests over a store that holds a few percent of them: how much is found, by us, LRU and Belady.",
    ("traces",),
    trace,
    common=COMMON,
)
_command(
    "endless",
    "A conversation twenty times as long as the context: what eviction costs, and what is found again.",
    ("ctx", "times", "facts", "through"),
    endless,
)
_command(
    "hf-turns",
    "Eight turns in the Hugging Face engine, against transformers.generate, which keeps nothing between them.",
    ("repeat",),
    hf_turns,
)
_command(
    "rag",
    "Passages seen before, in another order: moved and repaired, against a full prefill; time, work, answers.",
    ("questions", "tokens", "prompts"),
    rag,
)
_command(
    "gpu",
    "The Hugging Face engine with random weights, against eager transformers and the device's own limits.",
    ("device", "layers", "hidden", "tokens", "repeat"),
    gpu,
    common=COMMON,
)
_command(
    "all",
    "All of them, one after the other.",
    ("tokens", "sessions", "prefix", "repeat"),
    restart,
    turns,
    shared,
    miss,
    load,
    bits,
    store,
    memory,
    crowd,
    endless,
)


# ── running and printing ──


def _run(workloads: dict[str, Workload], flags: Flags) -> None:
    from emberkeep.bench.machine import surroundings
    from emberkeep.bench.report import report_json
    from emberkeep.bench.stage import require_context

    if flags.json_file is not None:
        # Tried before anything is measured: an hour's figures need a place to go.
        flags.json_file.open("a").close()
    with_model = {name: workload for name, workload in workloads.items() if workload.needs_model}
    needed = {name: workload.plan.context for name, workload in with_model.items() if not workload.loads_model}
    model = _model_file(flags) if with_model else None
    if model is not None and needed:
        require_context(model, needed)
    results = []
    with _place(model, flags.data_dir, with_words=bool(needed)) as stage:
        around = surroundings(model, stage.folder)
        for name, workload in workloads.items():
            _say(name)
            results.append(asyncio.run(workload.run(stage, workload.plan)))
            _print(results[-1])
            if flags.json_file is not None:
                # After every workload: an hour of measuring must not be lost to a Ctrl-C in the last one.
                flags.json_file.write_text(json.dumps(report_json(results, around), indent=2) + "\n")


def _place(model: Path | None, parent: Path | None, *, with_words: bool) -> AbstractContextManager[Folder]:
    from emberkeep.bench.stage import open_folder, open_place, open_stage

    if model is None:
        return open_folder(parent, _say)
    return open_stage(model, parent, _say) if with_words else open_place(model, parent, _say)


def _model_file(flags: Flags) -> Path:
    """The file of the configured model, which is pulled first when it is the default one and missing."""
    from emberkeep.models.library import ModelLibrary

    settled = load_config(model=flags.model, config=flags.config)
    install_model(settled)
    return ModelLibrary(settled.data_dir / "models").resolve(settled.model).path


def _say(what: str) -> None:
    console(stderr=True).print(f"… {what}", style="dim", markup=False)


def _print(result: Result) -> None:
    from emberkeep.bench.tables import render

    show("", *render(result))
