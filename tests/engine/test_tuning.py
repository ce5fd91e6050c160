"""How long steps take with flash attention and without is measured once, remembered, and never an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emberkeep.engine.base import Rows
from emberkeep.engine.llamacpp import tuning
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.tuning import Measured, batch_without_flash, measure
from emberkeep.engine.step_table import StepTable
from emberkeep.errors import EngineError
from helpers.engines import KINDS, TOKENS

SETTINGS = LlamaSettings(context=512, cells=512, sequences=4, batch=256, threads=1)
ROWS = (1, 8, 16, 45, 512)
SLOW = Measured(StepTable(ROWS, (64, 2048), ((10, 80, 160, 450, 900), (20, 160, 320, 900, 1800))))
QUICK = Measured(StepTable(ROWS, (64, 2048), ((9, 40, 80, 240, 900), (18, 80, 160, 480, 1800))), wide_rows=8)


def tune(*about: object) -> tuple[LlamaSettings, tuning.Tuning]:
    """As an engine does it: what is not known is measured when nothing waits."""
    settings, found = tuning.tune(*about)
    measured = found.measure(lambda: False) if found.measure is not None else None
    return settings, replace(measured or found, measure=None)


@pytest.fixture
def open_model(model_file) -> Iterator[Callable[..., LlamaModel]]:
    models = []

    def make(kind: str = "dense") -> LlamaModel:
        models.append(LlamaModel(model_file(kind)))
        return models[-1]

    yield make
    for model in models:
        model.close()


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tiny model were a large one, which survives everything and is measured in no time."""
    monkeypatch.setattr(tuning, "_SMALLEST", 0)
    monkeypatch.setattr(tuning, "_GRID_S", 0.02)
    monkeypatch.setattr(tuning, "survives_without_flash", lambda *_: True)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """What was measured: here it is known already."""
    done: list[list[bool]] = []

    def know(model: LlamaModel, ways: list[LlamaSettings], _: object) -> list[Measured]:
        done.append([way.flash for way in ways])
        return [SLOW if way.flash else QUICK for way in ways]

    monkeypatch.setattr(tuning, "measure", know)
    return done


# ── the choice ──


BOTH = {True: SLOW.table, False: QUICK.table}


def test_both_ways_are_measured_once_and_remembered(open_model, measurements, tmp_path: Path) -> None:
    """Whichever is quicker, it begins with flash attention: the engine changes to the other as work demands."""
    model = open_model()
    for _ in range(2):
        settings, found = tune(model, SETTINGS, "digest", None, tmp_path)
        assert settings == SETTINGS
        assert settings.flash
        assert found == tuning.Tuning("what is quicker, step by step", BOTH, wide_rows=8, has_choice=True)
    assert measurements == [[True, False]]


def test_what_was_measured_alone_is_measured_again_beside_the_other(
    open_model, measurements, tmp_path: Path
) -> None:
    """Two times are compared, so they must have been taken in the same minute."""
    tune(open_model(), SETTINGS, "digest", True, tmp_path)
    assert tune(open_model(), SETTINGS, "digest", None, tmp_path)[1].tables == BOTH
    assert measurements == [[True], [True, False]]
    for flash in (True, False, None):
        tune(open_model(), SETTINGS, "digest", flash, tmp_path)
    assert len(measurements) == 2


@pytest.mark.parametrize("other", [{"threads": 2}, {"kv_type": "q8_0"}], ids=str)
def test_what_changes_the_times_is_measured_anew(open_model, measurements, tmp_path: Path, other) -> None:
    model = open_model()
    tune(model, SETTINGS, "digest", None, tmp_path)
    tune(model, replace(SETTINGS, cells=1024, sequences=2), "digest", None, tmp_path)
    assert len(measurements) == 1
    tune(model, replace(SETTINGS, **other), "digest", None, tmp_path)
    tune(model, SETTINGS, "another digest", None, tmp_path)
    assert len(measurements) == 3


@pytest.mark.parametrize(
    "damage",
    [b"", b"[]", b'{"format": 1}', b'{"format": 3, "table": {}}'],
    ids=["empty", "a list", "nothing in it", "no table"],
)
def test_a_damaged_file_is_measured_again(open_model, measurements, tmp_path: Path, damage: bytes) -> None:
    model = open_model()
    tune(model, SETTINGS, "digest", None, tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(damage)
    assert tune(model, SETTINGS, "digest", None, tmp_path)[1].tables == BOTH
    assert measurements == [[True, False]] * 2


def test_what_was_measured_beside_other_programs_is_measured_again_at_the_next_start(
    open_model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Until once it was not; the less counts, and is remembered."""
    busy = [replace(QUICK, is_whole=False), replace(SLOW, is_whole=False)]
    answers, asked = [busy, busy, [SLOW, QUICK]], list[list[bool]]()

    def know(model: LlamaModel, ways: list[LlamaSettings], _: object) -> list[Measured]:
        asked.append([way.flash for way in ways])
        return answers.pop(0)

    def tables() -> dict[bool, object]:
        tables = tune(open_model(), SETTINGS, "digest", None, tmp_path)[1].tables
        return {flash: table.json() for flash, table in tables.items()}

    monkeypatch.setattr(tuning, "measure", know)
    swapped = {True: QUICK.table.json(), False: SLOW.table.json()}
    least = {True: QUICK.join(SLOW).table.json(), False: SLOW.join(QUICK).table.json()}
    assert least[False] == QUICK.table.json() != swapped[False]
    assert [tables() for _ in range(4)] == [swapped, swapped, least, least]
    assert asked == [[True, False]] * 3


def test_of_two_measurements_the_less_counts() -> None:
    few = Measured(StepTable((1, 8), (64, 2048), ((9, 90), (18, 80))), 8, is_whole=False)
    joined = few.join(SLOW)
    assert joined.table.rows == ROWS
    assert [round(time) for time in joined.table.milliseconds[0]] == [9, 72, 144, 405, 900]
    assert [round(time) for time in joined.table.milliseconds[1]] == [18, 80, 160, 480, 1800]
    assert (joined.wide_rows, joined.is_whole) == (8, True)
    elsewhere = Measured(StepTable((1, 8), (64,), ((9, 40),)))
    assert few.join(elsewhere) == elsewhere


def test_rows_between_blocks_of_four_are_reckoned_where_three_take_as_long_as_four() -> None:
    rows, times = (1, 2, 3, 4, 8, 64), (50, 90, 130, 120, 200, 1480)
    blocks = Measured(StepTable(rows, (64,), (times,), logits_ms=4))
    joined = blocks.join(blocks).table
    assert joined.logits_ms == pytest.approx(4)
    taken = dict(zip(joined.rows, (round(time) for time in joined.milliseconds[0]), strict=True))
    assert taken.items() >= dict(zip(rows, times, strict=True)).items()
    assert [taken[count] for count in (5, 6, 7)] == [160, 200, 240]
    assert [taken[count] for count in (9, 12, 13, 16)] == [240, 291, 331, 383]
    assert max(joined.rows) == 64
    evenly = Measured(StepTable(rows, (64,), ((50, 90, 105, 120, 200, 1480),)))
    assert evenly.join(evenly).table.rows == rows


def test_a_folder_that_cannot_be_written_costs_time_only(open_model, measurements, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        assert tune(open_model(), SETTINGS, "digest", None, tmp_path / "file" / "folder")[1].tables == BOTH
    assert len(measurements) == 2


@pytest.mark.parametrize("flash", [None, True, False])
def test_where_nothing_can_be_measured_it_serves_as_asked_and_else_with_it(
    open_model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flash: bool | None
) -> None:
    def fail(*_: object) -> None:
        raise EngineError("out of memory")

    monkeypatch.setattr(tuning, "open_context", fail)
    settings, found = tune(open_model(), SETTINGS, "digest", flash, tmp_path)
    assert settings == replace(SETTINGS, flash=flash is not False)
    reason = "what is quicker, step by step" if flash is None else "as asked"
    assert found == tuning.Tuning(reason, has_choice=flash is None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flash", [True, False])
def test_what_is_asked_for_is_done_and_measured_alone(open_model, measurements, tmp_path: Path, flash) -> None:
    settings, found = tune(open_model(), SETTINGS, "digest", flash, tmp_path)
    assert settings.flash == flash
    measured = SLOW if flash else QUICK
    assert found == tuning.Tuning("as asked", {flash: measured.table}, measured.wide_rows)
    assert measurements == [[flash]]


@pytest.mark.parametrize("flash", [None, False])
def test_it_stays_on_where_there_is_no_choice(
    open_model, measurements, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flash: bool | None
) -> None:
    def reason(model: LlamaModel, settings: LlamaSettings = SETTINGS) -> str:
        tuned, found = tune(model, settings, "digest", flash, tmp_path)
        assert tuned == settings
        assert found.tables == {True: SLOW.table}
        return found.reason

    assert reason(open_model(), replace(SETTINGS, kv_type="q8_0")) == "q8_0 values need it"
    on_gpu = open_model()
    on_gpu.offloads = True
    assert reason(on_gpu) == "layers are on a GPU"
    monkeypatch.setattr(tuning, "survives_without_flash", lambda *_: False)
    assert reason(open_model()) == "the model does not run without it"
    assert all(done == [True] for done in measurements)


def test_a_small_model_is_not_measured(open_model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuning, "_SMALLEST", 1 << 30)
    settings, found = tune(open_model(), SETTINGS, "digest", None, tmp_path)
    assert (settings, found) == (SETTINGS, tuning.Tuning("the model is small"))
    assert not list(tmp_path.iterdir())


def test_steps_are_smaller_where_scores_of_large_ones_have_no_room(
    open_model, measurements, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A number for each row, cell and head; a sixteenth of RAM may be taken."""
    model, settings = open_model(), replace(SETTINGS, cells=4096, batch=512)
    heads = tuning.llama().llama_model_n_head(model.handle)
    for free_rows, batch in ((512, 512), (500, 256), (128, 128), (127, None)):
        monkeypatch.setattr(tuning, "total_ram", lambda rows=free_rows: 16 * rows * 4096 * heads * 4)
        assert batch_without_flash(model, settings) == batch
        tuned, found = tune(model, settings, "digest", None, tmp_path)
        assert (tuned.flash, tuned.batch) == (True, batch or 512)
        assert found.tables == (BOTH if batch else {True: SLOW.table})
        asked, _ = tune(model, settings, "digest", False, tmp_path)
        assert (asked.flash, asked.batch) == (False, batch or 128)
    assert "too much memory" in found.reason


# ── measuring ──


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_are_measured_of_every_kind_of_model(open_model, kind: str) -> None:
    model = open_model(kind)
    for measured in measure(model, [SETTINGS, replace(SETTINGS, flash=False)]):
        assert measured.table.rows[0] == 1
        assert 0 < measured.table.depths[0] <= 64
        assert StepTable.from_json(measured.table.json()).seconds(8, 100) > 0


@pytest.mark.parametrize("kind", ["dense", "sliding window", "moe"])
def test_what_is_found_to_be_wide_is(open_model, kind: str) -> None:
    """In cuts that were not tried when it was measured."""
    model = open_model(kind)
    (measured,) = measure(model, [replace(SETTINGS, flash=False)])
    assert measured.wide_rows is not None
    engine = LlamaEngine(
        model, replace(SETTINGS, flash=False), "d", tuning.Tuning("", wide_rows=measured.wide_rows)
    )
    wide = engine.capabilities.wide_rows
    assert wide == measured.wide_rows
    whole = state_after(engine, [250])
    for rows in range(wide, 60, 5):
        assert state_after(engine, [*[rows] * (250 // rows - 1), rows + 250 % rows]) == whole
    engine.close()


def test_nothing_is_wide_without_flash_unless_it_was_measured(open_engine) -> None:
    assert open_engine(flash=False).capabilities.wide_rows is None


def state_after(engine: LlamaEngine, slices: list[int]) -> bytes:
    start = 0
    for count in slices:
        engine.evaluate([Rows(0, start, TOKENS[start : start + count], outputs=0)])
        start += count
    state = b"".join(bytes(part) for part in engine.export_kv(0, [0, start]).payloads())
    engine.trim(0, 0)
    return state


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks for the cores of a thread")
def test_measuring_leaves_threads_and_cores_as_they_were(open_model) -> None:
    cores, running = os.sched_getaffinity(0), len(list(Path("/proc/self/task").iterdir()))
    measure(open_model(), [replace(SETTINGS, threads=2)])
    assert os.sched_getaffinity(0) == cores
    assert len(list(Path("/proc/self/task").iterdir())) <= running + 1  # OpenMP keeps its own


def test_outliers_are_not_believed() -> None:
    """No step takes longer than smaller ones with as many rows."""
    times = {1: 0.01, 2: 0.5, 8: 0.05, 64: 0.3, 128: 9.0}
    table = tuning._table({64: times})
    assert np.allclose(table.milliseconds[0], [10, 20, 50, 300, 600])
