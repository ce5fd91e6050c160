"""Tiny models, written once, and engines over them that are closed again."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import product

import pytest

from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import Adapter, LlamaModel
from emberkeep.engine.llamacpp.tuning import NOT_TUNED, Tuning
from emberkeep.engine.step_table import StepTable
from helpers import tiny_gguf
from helpers.engines import KINDS, always, evaluate


@pytest.fixture(scope="session")
def model_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    writers = KINDS | {"wide": tiny_gguf.wide, "moe": tiny_gguf.moe}
    return functools.cache(lambda kind: writers[kind](folder / f"{kind}.gguf"))


@pytest.fixture
def flash() -> bool:
    """Modules that hold without flash attention, too, have one of their own."""
    return True


@pytest.fixture
def open_engine(model_file, flash):
    engines = []
    is_flash_on = flash

    def make(
        kind: str = "dense",
        *,
        cells: int = 1024,
        sequences: int = 8,
        batch: int = 256,
        digest: str = "digest",
        rope_switches: bool = True,
        kv_type: str = "f16",
        flash: bool = is_flash_on,
        adapters: Sequence[Adapter] = (),
        tuning: Tuning = NOT_TUNED,
        table: StepTable | None = None,
        tables: Mapping[bool, StepTable] | None = None,
    ) -> LlamaEngine:
        """`table`: what steps take. `tables`: with flash attention and without, which is then a choice."""
        settings = LlamaSettings(
            context=cells,
            cells=cells,
            sequences=sequences,
            batch=batch,
            threads=1,
            rope_switches=rope_switches,
            kv_type=kv_type,
            flash=flash,
        )
        if table is not None or tables is not None:
            tuning = Tuning("", tables if tables is not None else {flash: table}, has_choice=len(tables or ()) > 1)
        model = LlamaModel(model_file(kind), adapters=adapters)
        engines.append(LlamaEngine(model, settings, digest, tuning))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory):
    """Loaded once for all engines over it: they leave it as it is."""

    @functools.cache
    def load(family: str):
        # Here: most tests that could have one are about other engines, and torch takes seconds to import.
        from helpers import tiny_hf

        return tiny_hf.load(tiny_hf.write(tmp_path_factory.mktemp(family), family))

    return load


@pytest.fixture
def open_hf(hf_model):
    """Paged, unless the family's state is kept as a whole."""
    engines = []

    def make(
        family: str = "llama", *, cells: int = 1024, sequences: int = 8, batch: int = 256, digest: str = "digest"
    ):
        from emberkeep.engine.hf.whole_engine import open_engine as open_
        from helpers import tiny_hf

        engines.append(open_(hf_model(family), tiny_hf.settings(cells, cells, sequences, batch), digest))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(
    params=product((False, True), (True, False)), ids=["flash", "no flash", "now flash", "now no flash"]
)
def open_either_way(request, open_engine):
    """Engines with flash attention and without; the last two have a choice, and have come to one of both."""
    has_choice, flash = request.param

    def make(*kind: str, **settings: object) -> LlamaEngine:
        if not has_choice:
            return open_engine(*kind, flash=flash, **settings)
        engine = open_engine(*kind, tables=always(flash), **settings)
        evaluate(engine, 0, 0, 2)
        engine.trim(0, 0)
        assert engine._switch.has_choice == (engine._context.layout is not None)
        assert engine._switch.flash == flash or engine._context.layout is None
        return engine

    return make
