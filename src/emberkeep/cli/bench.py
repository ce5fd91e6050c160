"""`emberkeep bench`: how fast this machine is with stored state, against what is possible on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from enum import IntEnum
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, BadParameter, Option, Typer

from emberkeep.cli.console import console, show, show_facts
from emberkeep.cli.flags import ConfigFlag, ModelFlag, flags_of, load_config, logged, with_flags
from emberkeep.cli.model_setup import install_model
from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.bench.report import BenchResult
    from emberkeep.bench.stage import Folder


@dataclass(frozen=True, slots=True)
class Flags:
    """Every flag of every benchmark. Those of its own have the names of what they set in its plan."""

    file: Annotated[
        Path | None,
        Argument(metavar="FILE", exists=True, help="Recorded conversations, or a folder of them."),
    ] = None
    model: ModelFlag = None
    models: Annotated[
        list[str] | None,
        Option("--models", help="Several, one after the other: all that are installed, or names, one each time."),
    ] = None
    engine: Annotated[
        Literal["llamacpp", "hf"] | None, Option("--engine", help="What runs the model. [default: by its files]")
    ] = None
    questions: Annotated[
        Path | None,
        Option("--questions", exists=True, dir_okay=False, help="File of questions (default: our own)."),
    ] = None
    prompts: Annotated[int | None, Option("--prompts", min=1, help="Number of prompts.")] = None
    sizes: Annotated[
        list[int] | None, Option("--tokens", min=128, help="Prompt length; may be given several times.")
    ] = None
    sessions: Annotated[
        list[int] | None, Option("--sessions", min=1, help="Number of sessions; may be given several times.")
    ] = None
    prefix_tokens: Annotated[int | None, Option("--prefix", min=1, help="Tokens of the shared prefix.")] = None
    peer: Annotated[
        Path | None,
        Option("--peer", exists=True, dir_okay=False, resolve_path=True, help="The llama-server to compare with."),
    ] = None
    server: Annotated[
        str | None, Option("--server", help="A Valkey or Redis server to share state in: valkey://HOST:PORT.")
    ] = None
    data: Annotated[
        Path | None,
        Option("--data", exists=True, file_okay=False, help="Folder of recorded conversations, as JSON."),
    ] = None
    data_dir: Annotated[
        Path | None,
        Option(
            "--data-dir",
            help="Folder on the disk to measure; a subfolder of it is used and removed (default: temporary).",
        ),
    ] = None
    files: Annotated[
        list[Path] | None,
        Option("--trace", exists=True, dir_okay=False, help="A recorded trace; may be given several times."),
    ] = None
    replicas: Annotated[
        str | None,
        Option("--replicas", help="How many: 1..64 (and the powers of two between), or 1,3,8. [default: 1..64]"),
    ] = None
    policies: Annotated[
        list[str] | None,
        Option(
            "--policy",
            help="affinity, least_loaded or round_robin; may be given several times. [default: all of them]",
        ),
    ] = None
    slots: Annotated[
        int | None, Option("--slots", min=1, help="Requests that a replica works on at a time. [default: 8]")
    ] = None
    prefill: Annotated[
        float | None, Option("--prefill", min=1, help="Prompt tokens/s of a replica. [default: 8000]")
    ] = None
    decode: Annotated[float | None, Option("--decode", min=0.1, help="Tokens/s of each answer. [default: 60]")] = (
        None
    )
    import_rate: Annotated[
        float | None, Option("--import-rate", min=0.001, help="GB/s from RAM into the engine. [default: 10]")
    ] = None
    ram: Annotated[
        float | None, Option("--ram", min=0.001, help="GiB of state that a replica keeps. [default: 64]")
    ] = None
    token_kib: Annotated[
        float | None, Option("--token-kib", min=0.001, help="KiB of state per token. [default: 128]")
    ] = None
    remote: Annotated[
        float | None, Option("--remote", min=0.001, help="GiB of the remote tier. [default: 512]")
    ] = None
    no_remote: Annotated[bool, Option("--no-remote", help="Replicas share nothing.")] = False
    link: Annotated[
        float | None, Option("--link", min=0.001, help="GB/s of the remote tier, each way. [default: 3.125]")
    ] = None
    round_trip: Annotated[
        float | None, Option("--round-trip", min=0.001, help="Milliseconds to the remote tier. [default: 0.5]")
    ] = None
    speedup: Annotated[
        float | None, Option("--speedup", min=0.001, help="How much faster than recorded. [default: 1]")
    ] = None
    per_replica: Annotated[
        bool,
        Option("--per-replica", help="As many copies of the trace as replicas; no copy has anything of another."),
    ] = False
    conversations: Annotated[
        int | None, Option("--conversations", min=1, help="Only the first ones of a file. [default: 8]")
    ] = None
    most_turns: Annotated[
        int | None, Option("--most-turns", min=1, help="Of each conversation, at most. [default: 12]")
    ] = None
    restart_every: Annotated[
        int | None,
        Option(
            "--restart-every",
            min=1,
            help="Kill and start the server after so many turns. [default: once, half way]",
        ),
    ] = None
    answer_tokens: Annotated[int | None, Option("--answer-tokens", min=1, help="Most tokens of an answer.")] = None
    recorded: Annotated[
        bool, Option("--recorded", help="Send back what was answered then, and not what the model answers now.")
    ] = False
    out: Annotated[
        Path | None,
        Option("--out", file_okay=False, help="Folder for the server's logs, every response and summary.md."),
    ] = None
    requests: Annotated[
        int | None, Option("--requests", min=1, help="Only the first ones of a trace. [default: all]")
    ] = None
    repeat: Annotated[int | None, Option("--repeat", min=1, help="Rounds of everything that is timed.")] = None
    json_file: Annotated[
        Path | None, Option("--json", help="Write every sample, the machine and the versions to this file.")
    ] = None
    plot_file: Annotated[Path | None, Option("--plot", help="Draw what was measured into this SVG file.")] = None
    quick: Annotated[bool, Option("--quick", help="Small sizes: does it run? The numbers mean little.")] = False
    config: ConfigFlag = None


COMMON = ("data_dir", "json_file", "plot_file", "quick")
WITH_MODEL = ("model", "config", *COMMON)
OF_ALL = ("sizes", "sessions", "prefix_tokens", "repeat")
LAST = ("data_dir", "repeat", "json_file", "plot_file", "quick", "config")


class Needs(IntEnum):
    """What a benchmark is given; the later ones have all that the earlier ones have."""

    FOLDER = 0
    MODEL = 1
    """Which it loads by itself, so that it may also be one that only transformers can read."""
    WORDS = 2
    """Of which it makes prompts of a known length."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    name: str
    sentence: str
    module: str
    """Its `Workload` says how much is measured, and its `run` does it. Imported late, as in every command."""
    flags: tuple[str, ...] = ()
    """Of its own: fields of its plan."""
    needs: Needs = Needs.WORDS
    check: Callable[[Any], None] = field(default=lambda flags: None)
    """Gets the flags, and raises EmberkeepError or BadParameter where it cannot run."""
    lesson: str = ""
    """What its help says besides."""

    def plan(self, flags: Flags) -> Any:
        """What was asked for; explicit flags win over --quick."""
        plan = import_module(self.module).Workload()
        given = {name: getattr(flags, name) for name in self.flags}
        chosen = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if value
        }
        return replace(plan.quick() if flags.quick else plan, **chosen)


def _require_peer(flags: Flags) -> None:
    if flags.peer is None:
        raise BadParameter("give the program to compare with: --peer PATH of a llama-server.")


def _require_server(flags: Flags) -> None:
    if flags.server is None:
        raise BadParameter("give a server in which hosts share their state: --server valkey://HOST:PORT.")
    load_config(remote=flags.server)


def require_traces(flags: Flags) -> None:
    if not flags.files:
        raise BadParameter("give at least one trace with --trace FILE.")


def _check_cluster(flags: Flags) -> None:
    from emberkeep.bench.cluster import POLICIES, replica_counts

    require_traces(flags)
    if flags.replicas is not None:
        replica_counts(flags.replicas)
    if unknown := [name for name in flags.policies or () if name not in POLICIES]:
        raise BadParameter(f"there is no --policy {unknown[0]}: take {', '.join(POLICIES)}.")


def _require_conversations(flags: Flags) -> None:
    if flags.file is None:
        raise BadParameter("give a file of recorded conversations: emberkeep bench replay FILE.")


_ACCURACY_LESSON = """\
Nothing is timed. Greedy answers are compared token by token, with a part of the prompt from the engine, from RAM,
and from disk after a restart; how much two evaluations without stored state differ is the measure.

A file of questions is JSON or JSON lines: {"question": ..., "answer": ...}, or prompt, messages, turns or
conversations in their place, and context, ctxs or choices besides. With answers it also says how many were right.

\b
emberkeep bench accuracy --engine hf
emberkeep bench accuracy --questions FILE --prompts 100 --json FILE"""

_REPLAY_LESSON = """\
The first turn of every conversation is sent to a real server, then the second of each, and so on. In between the
server is killed and started again. What is sent back is what the model answered, as clients do it.

A file is JSON or JSON lines: {"messages": [{"role": ..., "content": ...}]}, lists of messages, or ShareGPT's
{"conversations": [{"from": "human", "value": ...}]}. Calls and results of tools are sent as text.

\b
emberkeep bench replay FILE --models all --out FOLDER
emberkeep bench replay FOLDER --restart-every 5 --conversations 2"""

_CLUSTER_LESSON = """\
Nothing is measured on this machine: the router and the stores of all replicas are real, and a clock that is
computed from the rates below says when each request is answered. A row takes some seconds.

A trace has one request per line, as those that were published with Mooncake: {"timestamp": 3000, "input_length":
1100, "output_length": 60, "hash_ids": [0, 7, 8]}. Times are milliseconds; each id stands for 512 tokens and
everything before them.

By default the same load meets more and more replicas. With --per-replica each replica brings a load of its own, so
that small and large clusters can be compared: take a --speedup that one replica can bear.

\b
emberkeep bench cluster --trace FILE --replicas 1..16
emberkeep bench cluster --trace FILE --replicas 8 --policy affinity --no-remote
emberkeep bench cluster --trace FILE --per-replica --speedup 0.2 --requests 1000

docs/several-machines.md says what was found with it."""


BENCHMARKS = (
    Benchmark(
        "restart",
        "Time to first token in a fresh process: nothing stored, against resumed after a crash.",
        "emberkeep.bench.restart",
        ("sizes", "repeat"),
    ),
    Benchmark(
        "start",
        "From the start of a server to the first token, with what it remembers and without; beside --peer PATH.",
        "emberkeep.bench.start",
        ("peer", "repeat"),
        Needs.MODEL,
    ),
    Benchmark(
        "turns",
        "Eight turns of a conversation: time to first token and reuse of each.",
        "emberkeep.bench.turns",
        ("repeat",),
    ),
    Benchmark(
        "shared",
        "Many sessions over one prefix: tokens evaluated and bytes stored for what is unique.",
        "emberkeep.bench.shared",
        ("sessions", "prefix_tokens"),
    ),
    Benchmark("load", "Eight clients at once, against a bare decode loop.", "emberkeep.bench.load", ("repeat",)),
    Benchmark(
        "peers",
        "The same model in our server and in a llama-server (--peer PATH), in turns: first tokens, tokens/s.",
        "emberkeep.bench.peers",
        ("peer", "sizes", "repeat"),
        check=_require_peer,
    ),
    Benchmark(
        "hosts",
        "A prompt that another host has evaluated: from a server that both share (--server URL), and from disk.",
        "emberkeep.bench.hosts",
        ("server", "sizes", "repeat"),
        check=_require_server,
    ),
    Benchmark(
        "speculation",
        "Decoding with drafts and without, and beside a llama-server's n-gram modes (--peer PATH).",
        "emberkeep.bench.speculation",
        ("peer", "data", "repeat"),
    ),
    Benchmark(
        "accuracy",
        "Answers from stored state against cold ones, by how much was reused: the same but for rounding?",
        "emberkeep.bench.accuracy",
        ("engine", "questions", "prompts", "answer_tokens"),
        Needs.MODEL,
        lesson=_ACCURACY_LESSON,
    ),
    Benchmark(
        "replay",
        "Recorded conversations, turn by turn, through a server that is killed in between.",
        "emberkeep.bench.replay",
        ("file", "models", "conversations", "most_turns", "restart_every", "answer_tokens", "recorded", "out"),
        Needs.MODEL,
        _require_conversations,
        _REPLAY_LESSON,
    ),
    Benchmark(
        "cluster",
        "Many replicas and a remote tier that they share, simulated: what routing does (--trace FILE).",
        "emberkeep.bench.cluster",
        (
            *("files", "replicas", "policies", "slots", "prefill", "decode", "import_rate", "ram", "token_kib"),
            *("remote", "no_remote", "link", "round_trip", "speedup", "per_replica", "requests"),
        ),
        Needs.FOLDER,
        _check_cluster,
        _CLUSTER_LESSON,
    ),
)
ALL = ("restart", "turns", "shared", "load")


def make_app(
    sentence: str, benchmarks: Iterable[Benchmark], in_all: Iterable[str], flags: type[Flags] = Flags
) -> Typer:
    """A command for each benchmark, and `all` for those with these names."""
    app = Typer(
        help=sentence,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    by_name = {benchmark.name: benchmark for benchmark in benchmarks}
    for benchmark in by_name.values():
        common = COMMON if benchmark.needs is Needs.FOLDER else WITH_MODEL
        chosen = _parameters(flags, common + benchmark.flags)
        about = f"{benchmark.sentence}\n\n{benchmark.lesson}".rstrip()
        app.command(benchmark.name, help=about, short_help=benchmark.sentence)(
            _command([benchmark], flags, chosen)
        )
    everything = _command([by_name[name] for name in in_all], flags, _parameters(flags, WITH_MODEL + OF_ALL))
    app.command("all", help="All of them, one after the other.")(everything)
    app.command("report", help="Pictures and tables of what --json has written, as a page.")(report)
    return app


@logged
def report(
    folder: Annotated[Path, Argument(metavar="DIR", exists=True, file_okay=False, help="Folder of the files.")],
    output: Annotated[
        Path | None,
        Option("--output", "-o", dir_okay=False, help="The page (default: report.html in the folder)."),
    ] = None,
) -> None:
    from emberkeep.bench.report_page import page, read_reports

    target = output or folder / "report.html"
    target.write_text(page(read_reports(folder)), encoding="utf-8")
    show(f"{target}: open it in a browser.")


def _parameters(flags: type[Flags], names: tuple[str, ...]) -> list[Parameter]:
    known = {flag.name: flag for flag in flags_of(flags)}
    assert known.keys() >= set(names)
    return sorted((known[name] for name in known if name in names), key=lambda flag: flag.name in LAST)


def _command(
    benchmarks: Sequence[Benchmark], flags: type[Flags], parameters: Sequence[Parameter]
) -> Callable[..., None]:
    def command(**given: Any) -> None:
        _run(benchmarks, flags(**given))

    return with_flags(command, parameters)


app = make_app(
    "Measure this machine: restarts, turns, sharing, load, drafts, another server. Leave it alone meanwhile.",
    BENCHMARKS,
    ALL,
)


# ── running and printing ──


def _run(benchmarks: Sequence[Benchmark], flags: Flags) -> None:
    from emberkeep.bench.report import render
    from emberkeep.bench.stage import require_context
    from emberkeep.bench.surroundings import surroundings

    for benchmark in benchmarks:
        benchmark.check(flags)
    if flags.models:
        flags = _with_model_files(flags)
    plans = [benchmark.plan(flags) for benchmark in benchmarks]
    for file in (flags.json_file, flags.plot_file):
        if file is not None:
            # Tried before anything is measured: an hour's figures need a place to go.
            file.open("a").close()
    needs = max(benchmark.needs for benchmark in benchmarks)
    model = _model_file(flags) if needs >= Needs.MODEL else None
    if model is not None and needs is Needs.WORDS:
        pairs = zip(benchmarks, plans, strict=True)
        require_context(model, {one.name: plan.context for one, plan in pairs if one.needs is Needs.WORDS})
    results = []
    with _place(model, flags.data_dir, with_words=needs is Needs.WORDS) as stage:
        around = surroundings(model, stage.folder)
        if flags.peer is not None:
            around["doctor"] = _tell_machine(flags)
        for benchmark, plan in zip(benchmarks, plans, strict=True):
            _say(benchmark.name)
            results.append(asyncio.run(import_module(benchmark.module).run(stage, plan)))
            show("", *render(results[-1]))
            # After every benchmark: an hour of measuring must not be lost to a Ctrl-C in the last one.
            _write_reports(results, around, flags)


def _write_reports(results: Sequence[BenchResult], around: Mapping[str, Json], flags: Flags) -> None:
    from emberkeep.bench.charts import charts_of
    from emberkeep.bench.report import report_json
    from emberkeep.bench.svg import draw

    if flags.json_file is not None:
        flags.json_file.write_text(json.dumps(report_json(results, around), indent=2) + "\n")
    if flags.plot_file is not None:
        flags.plot_file.write_text(draw(charts_of(results)), encoding="utf-8")


def _tell_machine(flags: Flags) -> dict[str, str]:
    """What `emberkeep doctor` says of the machine, printed: figures beside another server's will be quoted."""
    from emberkeep.cli.doctor import CHECKS

    settled = load_config(model=flags.model, config=flags.config)
    found = {name: CHECKS[name](settled).text for name in ("platform", "llama.cpp", "gpu", "memory", "speed")}
    show_facts(found.items())
    return found


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
    return ModelLibrary(settled.data_dir / "models").resolve(settled.local_model).path


def _with_model_files(flags: Flags) -> Flags:
    """Models as the paths of their files. Raises EmberkeepError where there is none."""
    from emberkeep.models.library import ModelLibrary

    library = ModelLibrary(load_config(config=flags.config).data_dir / "models")
    names = flags.models or []
    found = library.list() if names == ["all"] else [library.resolve(name) for name in names]
    if not found:
        raise EmberkeepError("No model is installed here: `emberkeep models pull NAME` gets one.")
    paths = [str(model.path) for model in found]
    return replace(flags, model=paths[0], models=paths)


def _say(what: str) -> None:
    console(stderr=True).print(f"… {what}", style="dim", markup=False)
