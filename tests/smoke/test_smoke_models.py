"""Several models behind one address, and both engines, on tiny models with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.types.request import Json
from helpers import tiny_gguf
from helpers.server_process import ServerProcess, serve
from helpers.several_models import install, with_memory_for_one

PROMPT = "ships wait at the pier until the tide comes in, and pay with coins. " * 6


def reused(server: ServerProcess, model: str) -> int:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    answer: Json = server.http.post(f"{server.url}/v1/completions", json=body).json()
    assert answer["model"] == model
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_two_models_take_turns_and_each_goes_on_from_its_own_state(tmp_path: Path) -> None:
    install(tmp_path, "first", "second")
    memory = with_memory_for_one(Config(data_dir=tmp_path, ctx=1024, parallel=1)).model_memory or 0
    options = ("--ctx", "1024", "--parallel", "1", "--models", "all", "--model-memory", str(memory))
    with serve("first", tmp_path, *options) as server:
        assert [reused(server, name) for name in ("first", "second")] == [0, 0]
        assert all(reused(server, name) > 256 for name in ("first", "second", "first"))
        server.stop()


@dataclass(frozen=True)
class Kind:
    engine: str
    model: Path
    unprintable: Mapping[int, float]
    """What is not text would not come back as it was sampled."""


def gguf(folder: Path) -> Kind:
    unprintable = (3 + byte for byte in (*range(32), *range(127, 256)))
    return Kind("llamacpp", tiny_gguf.dense(folder / "tiny.gguf"), dict.fromkeys(unprintable, -100.0))


def hf(folder: Path) -> Kind:
    from helpers import tiny_hf

    return Kind("hf", tiny_hf.write(folder / "tiny"), dict.fromkeys(tiny_hf.UNPRINTABLE, -100.0))


@pytest.mark.parametrize("make", [gguf, hf])
def test_every_engine_answers_and_finds_its_state_after_a_restart(
    make: Callable[[Path], Kind], tmp_path: Path
) -> None:
    kind = make(tmp_path)
    config = Config(model=str(kind.model), engine=kind.engine, data_dir=tmp_path / "data", threads=1)
    prompt, cached, text = ask(config, kind)
    assert (cached, prompt > 256, bool(text)) == (0, True, True)
    assert ask(config, kind) == (prompt, prompt - 1, text)


def test_state_is_found_with_another_number_of_threads(tmp_path: Path) -> None:
    kind = gguf(tmp_path)
    config = Config(model=str(kind.model), data_dir=tmp_path / "data", threads=1)
    prompt, *_ = ask(config, kind)
    assert ask(replace(config, threads=2), kind)[:2] == (prompt, prompt - 1)


def ask(config: Config, kind: Kind) -> tuple[int, int, str]:
    """(tokens of the prompt, of which reused, answer) of a process that begins and ends."""
    with Emberkeep.open(config) as llm:
        result = llm.chat(PROMPT, max_tokens=8, temperature=0, logit_bias=kind.unprintable)
    return result.usage.prompt_tokens, result.usage.cached_tokens, result.text
