"""What changes the bytes of llama.cpp's state changes its fingerprint, and nothing else should."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from emberkeep.engine.base import Rows
from emberkeep.engine.llamacpp import LlamaEngine, LlamaModel, LlamaSettings, context
from emberkeep.engine.llamacpp.context import Tuning
from emberkeep.engine.llamacpp.engine import WIDE_ROWS
from emberkeep.engine.llamacpp.shared_library import LibraryFile, digest, files, library_in_use
from emberkeep.engine.llamacpp.step_timing import measure
from emberkeep.engine.step_table import StepTable
from emberkeep.kv.tree import Chunk, Cursor, Made, Segment, path_to
from helpers.engines import KINDS, RANGE_KINDS, TOKENS, exported
from helpers.scheduling import Rig, text

PLAIN = LlamaSettings(context=256, cells=256, sequences=2, batch=64, threads=1)
TABLE = StepTable((1,), (64,), ((1.0,),))


@pytest.fixture
def fingerprint_of(model_file):
    def of(settings: LlamaSettings = PLAIN, kind: str = "wide", *, ways: Sequence[bool] = ()) -> bytes:
        tuning = Tuning("", dict.fromkeys(ways, TABLE), has_choice=len(ways) > 1)
        engine = LlamaEngine(LlamaModel(model_file(kind)), settings, "digest", tuning)
        engine.close()
        return engine.fingerprint

    return of


# ── fingerprints ──


def test_what_is_set_up_the_same_has_the_same_fingerprint(fingerprint_of) -> None:
    assert fingerprint_of() == fingerprint_of()
    assert fingerprint_of() == fingerprint_of(dataclasses.replace(PLAIN, sequences=4, batch=128))


@pytest.mark.parametrize("other", [{"threads": 2}, {"kv_type": "q8_0"}, {"flash": False}], ids=str)
def test_threads_types_and_attention_have_fingerprints_of_their_own(fingerprint_of, other) -> None:
    assert fingerprint_of(dataclasses.replace(PLAIN, **other)) != fingerprint_of()


def test_a_choice_of_attention_has_a_fingerprint_of_its_own(fingerprint_of) -> None:
    """What is stored may have been computed in either way, so it is of no use where one of them was asked for."""
    fixed = {fingerprint_of(dataclasses.replace(PLAIN, flash=flash)) for flash in (True, False)}
    either = fingerprint_of(ways=(True, False))
    assert either not in fixed
    assert either == fingerprint_of(dataclasses.replace(PLAIN, sequences=4, batch=128), ways=(True, False))


@pytest.mark.parametrize("flash", [True, False])
def test_that_one_way_was_measured_does_not_change_the_fingerprint(fingerprint_of, flash: bool) -> None:
    settings = dataclasses.replace(PLAIN, flash=flash)
    assert fingerprint_of(settings, ways=(flash,)) == fingerprint_of(settings)


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (context, "loaded_digest", lambda: "another build"),
        (context, "version", lambda: "another version"),
        (context, "system_info", lambda: "other kernels"),
        (context.platform, "machine", lambda: "another machine"),
    ],
    ids=["library", "version", "kernels", "machine"],
)
def test_another_build_or_machine_has_a_fingerprint_of_its_own(
    fingerprint_of, monkeypatch, owner, name, other
) -> None:
    before = fingerprint_of()
    monkeypatch.setattr(owner, name, other)
    assert fingerprint_of() != before


def test_a_switch_of_the_environment_has_a_fingerprint_of_its_own(fingerprint_of, monkeypatch) -> None:
    before = fingerprint_of()
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    assert fingerprint_of() != before


def test_a_changed_file_beside_the_library_is_another_library(tmp_path: Path) -> None:
    """Most of what computes is in ggml's files, which are loaded with it."""
    folder = tmp_path / "lib"
    folder.mkdir()
    for path in files(library_in_use()):
        (folder / path.name).symlink_to(path)
    same = LibraryFile("named", folder / library_in_use().path.resolve().name)
    assert digest(same) == digest(library_in_use())
    kernels = next(path for path in folder.iterdir() if "ggml" in path.name)
    changed = kernels.read_bytes() + b"\0"
    kernels.unlink()
    kernels.write_bytes(changed)
    assert digest(dataclasses.replace(same, kind="changed")) != digest(library_in_use())


# ── the shape of a step ──


def computed(engine: LlamaEngine, slices: list[int]) -> bytes:
    """The state after slices of so many tokens."""
    start = 0
    for count in slices:
        engine.evaluate([Rows(0, start, TOKENS[start : start + count], outputs=0)])
        start += count
    state = b"".join(bytes(part) for part in engine.export_kv(0, [0, 100, start]).payloads())
    if engine.capabilities.kv_unit.has_snapshots:
        state += bytes(engine.export_snapshot(0))
    engine.trim(0, 0)
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_wide_steps_give_the_same_bytes_however_a_prompt_is_cut(open_engine, kind) -> None:
    engine = open_engine(kind)
    assert engine.capabilities.wide_rows == WIDE_ROWS
    whole = computed(engine, [256])
    for slices in ([64] * 4, [128, 128], [65, 191], [100, 92, 64]):
        assert computed(engine, slices) == whole


@pytest.mark.parametrize("kind", RANGE_KINDS)
def test_narrow_steps_do_not(open_engine, kind) -> None:
    """Else there would be nothing to record."""
    engine = open_engine(kind)
    assert computed(engine, [WIDE_ROWS - 1] * 4) != computed(engine, [252])


def test_with_a_choice_of_attention_nothing_is_wide(open_engine) -> None:
    tuning = Tuning("", {True: TABLE, False: TABLE}, wide_rows=8, has_choice=True)
    assert open_engine(tuning=tuning).capabilities.wide_rows is None


def test_where_a_gpu_computes_nothing_is_wide(open_engine, monkeypatch) -> None:
    engine = open_engine()
    monkeypatch.setattr(engine._model, "offloads", True)
    assert engine._learn_capabilities().wide_rows is None


@pytest.mark.parametrize(("seed", "flash"), [(0, True), (1, True), (2, False), (3, False)])
def test_what_is_said_to_be_reproducible_is(open_engine, model_file, tmp_path: Path, seed: int, flash) -> None:
    """Conversations that begin, branch and run beside each other; then a lone evaluation of what came of them."""
    draw = random.Random(seed)
    prompts = [text(draw.randint(70, 400), seed=number) for number in range(3)]
    open_engine = partial(open_engine, "dense", cells=4096, flash=flash)
    if not flash:
        model = LlamaModel(model_file("dense"))
        (measured,) = measure(model, [dataclasses.replace(PLAIN, flash=False)])
        model.close()
        open_engine = partial(open_engine, tuning=Tuning("", wide_rows=measured.wide_rows))
    with Rig(tmp_path, open_engine(), parallel=2, prefill_slice=256) as rig:
        rig.run(text(400, seed=99), max_new=4, closing=())
        for number in range(8):
            asked = [draw.choice(prompts) for _ in range(draw.choice((1, 1, 2)))]
            for recorder in [rig.start(prompt, max_new=4, closing=()) for prompt in asked]:
                recorder.wait()
            rig.settle()
            begun = draw.choice(prompts)
            prompts.append([*begun[: draw.randint(1, len(begun))], *text(draw.randint(5, 300), seed=100 + number)])
        chunks = list(rig.store._ledger.tree)
    promised = [chunk for chunk in chunks if chunk.made & Made.REPRODUCIBLE]
    assert len(chunks) > len(promised) >= 3  # those of the first prompt at least
    alone = open_engine(batch=512)
    for chunk in promised:
        assert evaluated_alone(alone, chunk) == bytes(chunk.payload)


def way_to(chunk: Chunk) -> tuple[Segment, ...]:
    return path_to(Cursor(chunk, len(chunk.tokens), chunk.lineage))


def evaluated_alone(engine: LlamaEngine, chunk: Chunk) -> bytes:
    """In wide steps: what stands behind a token does not change its state, so there may be anything."""
    parts = [part.chunk.tokens[: part.end - part.start] for part in way_to(chunk)]
    tokens = np.concatenate([*parts, TOKENS[: 2 * WIDE_ROWS]])
    half = len(tokens) // 2
    engine.evaluate([Rows(0, 0, tokens[:half], outputs=0)])
    engine.evaluate([Rows(0, half, tokens[half:], outputs=0)])
    state = bytes(exported(engine, 0, chunk.start, chunk.end))
    engine.trim(0, 0)
    return state
