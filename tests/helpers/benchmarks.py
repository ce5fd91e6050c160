"""Benchmarks in this process, and a workspace without a model."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.trace_file import Visit
from emberkeep.bench.servers import Reply
from emberkeep.bench.workspace import Words, Workspace


def measure(folder: Path, *arguments: str) -> dict[str, Any]:
    """The only result of `python -m benchmarks`."""
    report = folder / "report.json"
    main([*arguments, "--json", str(report)])
    (result,) = json.loads(report.read_text())["results"]
    return dict(result)


class ScriptedWorkspace(Workspace):
    """Whatever the model is, it has room for everything."""

    def __init__(self, folder: Path, words: Words | None = None, model: str = "none.gguf") -> None:
        super().__init__(folder, lambda _: None, lambda: folder / model)
        if words is not None:
            vars(self)["words"] = words

    def require_context(self, tokens: int) -> None: ...


def reply(
    *, ttft_ms: float = 100.0, prompt: int = 100, completion: int = 10, cached: int = 0, **timings: float
) -> Reply:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return Reply(ttft_ms, "", usage, timings, {})


@st.composite
def prompts_in_turns(draw: st.DrawFn, most: int = 30) -> list[tuple[int, ...]]:
    """Blocks of conversations in turns: each request goes on from the beginning of one that was before."""
    fresh = count()
    prompts: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, most))):
        known = prompts[draw(st.integers(0, len(prompts) - 1))]
        begin = known[: draw(st.integers(0, len(known)))]
        prompts.append((*begin, *(next(fresh) for _ in range(draw(st.integers(0 if begin else 1, 3))))))
    return prompts[1:]


def written(path: Path, visits: list[Visit]) -> Path:
    """A trace of these."""
    lines = [json.dumps({"hash_ids": visit.blocks, "input_length": visit.tokens}) for visit in visits]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
