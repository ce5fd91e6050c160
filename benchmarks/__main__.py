"""`python -m benchmarks`: every benchmark, those of `emberkeep bench` and those of single parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Option

from emberkeep.cli.bench import BENCHMARKS as USERS
from emberkeep.cli.bench import Benchmark, Flags, Needs, make_app, require_traces
from emberkeep.cli.flags import setting
from emberkeep.cli.main import run
from emberkeep.engine.extras import require_hf


@dataclass(frozen=True, slots=True)
class PartsFlags(Flags):
    chunks: Annotated[int | None, Option("--chunks", min=100, help="Chunks in the store.")] = None
    turns: Annotated[int | None, Option("--turns", min=100, help="Archived turns.")] = None
    searches: Annotated[int | None, Option("--searches", min=4, help="Searches that are timed.")] = None
    writes: Annotated[int | None, Option("--writes", min=1, help="Archived turns that are timed.")] = None
    device: Annotated[str | None, setting("device")] = None
    layers: Annotated[int | None, Option("--layers", min=1, help="Layers of the random model.")] = None
    hidden: Annotated[int | None, Option("--hidden", min=8, help="Width of its layers.")] = None
    ctx: Annotated[int | None, Option("--ctx", min=128, help="Tokens of the context.")] = None
    times: Annotated[int | None, Option("--times", min=1, help="How many contexts the conversation fills.")] = None
    facts: Annotated[int | None, Option("--facts", min=1, max=100, help="Facts told and asked for.")] = None
    through: Annotated[
        Literal["http", "library"] | None, Option("--through", help="How to talk (default: http).")
    ] = None


def _require_hf(_: Flags) -> None:
    require_hf()


PARTS = (
    Benchmark(
        "miss", "What looking up and storing cost when nothing is reusable.", "benchmarks.miss", ("repeat",)
    ),
    Benchmark(
        "swap",
        "Two models in turns with memory for one: the first token after a swap, ours and a llama-server's.",
        "benchmarks.swap",
        ("peer", "sizes", "repeat"),
    ),
    Benchmark("doors", "A new prompt through every API: what each costs.", "benchmarks.doors", ("repeat",)),
    Benchmark(
        "bits",
        "State in 16, 8 and 4 bits: its size, its speed, and what is left of an answer.",
        "benchmarks.bits",
        ("prompts",),
    ),
    Benchmark(
        "store",
        "A store with a hundred thousand chunks: opening it, and looking up a prompt.",
        "benchmarks.store",
        ("repeat", "chunks"),
        Needs.FOLDER,
    ),
    Benchmark(
        "memory",
        "A million archived turns: searching them, and archiving one more.",
        "benchmarks.memory",
        ("turns", "searches", "writes"),
        Needs.FOLDER,
    ),
    Benchmark(
        "crowd",
        "A hundred conversations over a budget that holds twenty: does it hold, and who is still there?",
        "benchmarks.crowd",
        needs=Needs.FOLDER,
    ),
    Benchmark(
        "trace",
        "Recorded requests over a store that holds a few percent of them: how much is found, by us, LRU and "
        "Belady.",
        "benchmarks.trace",
        ("files",),
        Needs.FOLDER,
        require_traces,
    ),
    Benchmark(
        "endless",
        "A conversation twenty times as long as the context: what eviction costs, and what is found again.",
        "benchmarks.endless",
        ("ctx", "times", "facts", "through"),
    ),
    Benchmark(
        "agents",
        "Sessions of coding agents (--data FOLDER): tokens evaluated for what is unique, and by a llama-server "
        "(--peer PATH).",
        "benchmarks.agents",
        ("peer", "data", "ctx"),
        Needs.MODEL,
    ),
    Benchmark(
        "hf-turns",
        "Eight turns in the Hugging Face engine, against transformers.generate, which keeps nothing between them.",
        "benchmarks.hf_turns",
        ("repeat",),
        Needs.MODEL,
        _require_hf,
    ),
    Benchmark(
        "rag",
        "Passages seen before, in another order: moved and repaired, against a full prefill; time, work, answers.",
        "benchmarks.rag",
        ("questions", "sizes", "prompts"),
        Needs.MODEL,
        _require_hf,
    ),
    Benchmark(
        "gpu",
        "An engine with random weights, against eager transformers and the device's own limits.",
        "benchmarks.gpu",
        ("engine", "device", "layers", "hidden", "sizes", "repeat"),
        Needs.FOLDER,
        _require_hf,
    ),
)

ALL = ("restart", "turns", "shared", "miss", "load", "bits", "store", "memory", "crowd", "endless")

app = make_app(
    "Measure this machine: restarts, turns, sharing, load, bits, stores, memory. Leave it alone meanwhile.",
    (*USERS, *PARTS),
    ALL,
    PartsFlags,
)

if __name__ == "__main__":
    run(app)
