"""Tiny models, written once, and llama.cpp engines over them that are closed again."""

from __future__ import annotations

import functools

import pytest

from emberkeep.engine.llamacpp import LlamaEngine, LlamaModel, LlamaSettings
from helpers.engines import KINDS


@pytest.fixture(scope="session")
def model_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return functools.cache(lambda kind: KINDS[kind](folder / f"{kind}.gguf"))


@pytest.fixture
def open_engine(model_file):
    engines = []

    def make(
        kind: str = "dense",
        *,
        cells: int = 1024,
        sequences: int = 8,
        batch: int = 256,
        digest: str = "digest",
        rope_switches: bool = True,
    ) -> LlamaEngine:
        settings = LlamaSettings(
            context=cells, cells=cells, sequences=sequences, batch=batch, threads=1, rope_switches=rope_switches
        )
        engines.append(LlamaEngine(LlamaModel(model_file(kind)), settings, digest))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
