"""What changes the bytes of llama.cpp's state changes its fingerprint, and nothing else should."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.base import Payload, Rows
from emberkeep.engine.llamacpp import context, shared_library
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import WIDE_ROWS, LlamaEngine
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import LibraryFile, digest, files, library_in_use
from emberkeep.engine.llamacpp.tuning import Tuning, measure
from emberkeep.engine.step_table import StepTable
from emberkeep.kv.tree import Chunk, Cursor, Made, Segment, path_to
from emberkeep.runtime.parts import stored_by
from helpers.engines import KINDS, RANGE_KINDS, TOKENS, evaluate, exported, same
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


@pytest.mark.parametrize("other", [{"kv_type": "q8_0"}, {"flash": False}], ids=str)
def test_types_and_attention_have_fingerprints_of_their_own(fingerprint_of, other) -> None:
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
        (shared_library, "loaded_digest", lambda: "another build"),
        (shared_library, "version", lambda: "another version"),
        (shared_library, "system_info", lambda: "other kernels"),
        (shared_library.platform, "machine", lambda: "another machine"),
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


# ── threads ──


def identified(engine: LlamaEngine, **settings) -> bytes:
    settings = dataclasses.replace(PLAIN, **settings)
    return context.fingerprint(engine._model, "digest", settings, engine._context.handle, None, either=False)


def test_any_number_of_threads_has_the_same_fingerprint(open_engine) -> None:
    engine = open_engine()
    assert len({identified(engine, threads=threads) for threads in (1, 2, 64, None)}) == 1


def test_a_fingerprint_of_before_is_what_it_was(open_engine, monkeypatch) -> None:
    """An earlier version has given it to state that was computed with three threads."""
    engine = open_engine()
    for name in ("version", "loaded_digest", "system_info"):
        monkeypatch.setattr(shared_library, name, lambda name=name: name)
    monkeypatch.setattr(shared_library.platform, "machine", lambda: "machine")
    monkeypatch.setattr(shared_library, "loader_variables", list)
    found = identified(engine, stored=lambda names: list(names)[3])
    assert found.hex() == "0183f2f093056e03f23c665aaa59ffe97192656e6f5a77ddeb4a1f65813d2fa7"


@pytest.mark.slow  # threads that share a core wait for each other by spinning
def test_what_one_number_of_threads_computed_another_goes_on_with(model_file) -> None:
    """Single rows behind many cells are where the number of threads changes the order of a sum."""
    one, two = engines = [opened_with(threads, model_file("wide")) for threads in (1, 2)]
    evaluate(one, 0, 0, 300)
    two.import_kv(0, 0, 300, [exported(one, 0, 0, 300)], 0)
    for source in engines:
        for position in (300, 301):
            evaluate(source, 0, position, position + 1)
        state = exported(source, 0, 0, 302)
        after = [gone_on(engine, state) for engine in engines]
        assert same(source, after[0], after[1])
    for engine in engines:
        engine.close()


def opened_with(threads: int, model: Path, **more) -> LlamaEngine:
    settings = LlamaSettings(context=1024, cells=1024, sequences=4, batch=256, threads=threads, **more)
    return LlamaEngine(LlamaModel(model), settings, "digest")


def gone_on(engine: LlamaEngine, state: Payload) -> np.ndarray:
    """What is expected after one token more than `state` is of."""
    engine.import_kv(1, 0, 302, [state], 0)
    logits = evaluate(engine, 1, 302, 303)
    engine.trim(1, 0)
    return logits


@pytest.mark.slow
def test_a_folder_is_used_again_with_another_number_of_threads(model_file, tmp_path: Path) -> None:
    prompt = text(400)
    with Rig(tmp_path, opened_with(1, model_file("wide"))) as rig:
        rig.run(prompt, max_new=2, closing=())
    with Rig(tmp_path, opened_with(2, model_file("wide"))) as rig:
        assert rig.run(prompt, max_new=2, closing=()).lookup.cold_tokens == len(prompt) - 1


def test_a_folder_of_before_is_used_again_whatever_the_number_of_threads_was(model_file, tmp_path: Path) -> None:
    prompt = text(400)
    with Rig(tmp_path / "kv", opened_with(1, model_file("wide"), stored=lambda names: list(names)[7])) as rig:
        rig.run(prompt, max_new=2, closing=())
    stored = stored_by(Config(data_dir=tmp_path))
    with Rig(tmp_path / "kv", opened_with(1, model_file("wide"), stored=stored)) as rig:
        assert rig.run(prompt, max_new=2, closing=()).lookup.cold_tokens == len(prompt) - 1


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


@pytest.fixture(scope="module")
def wide_rows(model_file) -> int | None:
    """Measured without flash attention."""
    model = LlamaModel(model_file("dense"))
    (measured,) = measure(model, [dataclasses.replace(PLAIN, flash=False)])
    model.close()
    return measured.wide_rows


@pytest.mark.parametrize(("seed", "flash"), [(0, True), (1, True), (2, False), (3, False)])
def test_what_is_said_to_be_reproducible_is(open_engine, wide_rows, tmp_path: Path, seed: int, flash) -> None:
    """Conversations that begin, branch and run beside each other; then a lone evaluation of what came of them."""
    draw = random.Random(seed)
    prompts = [text(draw.randint(70, 400), seed=number) for number in range(3)]
    open_engine = partial(open_engine, "dense", cells=4096, flash=flash)
    if not flash:
        open_engine = partial(open_engine, tuning=Tuning("", wide_rows=wide_rows))
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
