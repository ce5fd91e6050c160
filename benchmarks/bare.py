"""The bare engine: what the same tokens cost without a server, a scheduler or a store around them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from emberkeep.engine.base import Engine, Outcome, Rows
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.threads import one_core_each
from emberkeep.engine.llamacpp.tuning import Tuning, tune
from emberkeep.errors import EmberkeepError, EngineError
from emberkeep.signals import with_default_signals
from emberkeep.token_arrays import TokenArray


def parts_of_engine(model: Path, settings: LlamaSettings) -> tuple[LlamaModel, LlamaSettings, str, Tuning]:
    """As a server opens it, which chooses the quicker kind of attention. Raises ModelError, EngineError."""
    loaded, digest = LlamaModel(model), f"{model.name} of {model.stat().st_size} bytes"
    tuned, tuning = tune(loaded, settings, digest, flash=None)
    if tuning.measure is not None:
        tuning = tuning.measure(lambda: False) or tuning
    return loaded, tuned, digest, tuning


def prefill(engine: Engine, tokens: TokenArray, slices: Sequence[int]) -> None:
    """Evaluate a prompt in slices of these lengths, choose the next token, forget all."""
    start = 0
    for length in slices:
        end = start + length
        _evaluate(engine, [Rows(0, start, tokens[start:end], outputs=end == len(tokens))])
        start = end
    engine.logits(0).argmax()
    engine.trim(0, 0)


def decode_seconds(engine: Engine, prompts: Sequence[TokenArray], lengths: Sequence[int]) -> float:
    """Evaluate all prompts in one batch, then time decoding greedily until each has its length; forget all."""
    _evaluate(engine, [Rows(i, 0, prompt, outputs=1) for i, prompt in enumerate(prompts)])
    begin = perf_counter()
    chosen = {i: int(engine.logits(i).argmax()) for i in range(len(prompts))}
    for step in range(1, max(lengths)):
        alive = [i for i in chosen if step < lengths[i]]
        batch = [Rows(i, len(prompts[i]) + step - 1, np.array([chosen[i]], np.int32), outputs=1) for i in alive]
        _evaluate(engine, batch)
        chosen = {i: int(engine.logits(row).argmax()) for row, i in enumerate(alive)}
    seconds = perf_counter() - begin
    for i in range(len(prompts)):
        engine.trim(i, 0)
    return seconds


def decode_seconds_elsewhere(model: Path, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Returns `decode_seconds` of a process of its own. Raises EmberkeepError."""
    work = json.dumps({"model": str(model), "prompts": [list(p) for p in prompts], "lengths": list(lengths)})
    program = with_default_signals([sys.executable, "-P", __file__])
    done = subprocess.run(program, input=work, capture_output=True, text=True)
    if done.returncode:
        raise EmberkeepError(f"The bare loop failed: {done.stderr.strip()}")
    return float(done.stdout)


def _evaluate(engine: Engine, batch: Sequence[Rows]) -> None:
    if engine.evaluate(batch) is not Outcome.DONE:
        raise EngineError("The benchmark's prompts do not fit its context: choose smaller sizes.")


def _main() -> None:
    work = json.load(sys.stdin)
    prompts = [np.array(prompt, np.int32) for prompt in work["prompts"]]
    longest = max(len(prompt) + length for prompt, length in zip(prompts, work["lengths"], strict=True))
    settings = LlamaSettings(
        context=longest,
        cells=longest * len(prompts),
        sequences=len(prompts),
        batch=max(512, sum(len(prompt) for prompt in prompts)),
    )
    with one_core_each():
        engine = LlamaEngine(*parts_of_engine(Path(work["model"]), settings))
    try:
        decode_seconds(engine, prompts, [2] * len(prompts))  # the first steps of a process make it allocate
        print(decode_seconds(engine, prompts, work["lengths"]))
    finally:
        engine.close()


if __name__ == "__main__":
    _main()
