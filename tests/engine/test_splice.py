"""A splice removes a range in the middle: what follows moves up, and no other sequence is affected.

With one layer, keys and values depend on nothing but the token and its place. A spliced sequence is then what a
fresh evaluation of its tokens gives, which proves that everything stands, and was rotated, where it belongs.
"""

from __future__ import annotations

import numpy as np
import pytest

from emberkeep.engine.base import Engine, Outcome, Rows
from emberkeep.engine.fake import FakeEngine
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.errors import EngineError, StepFailed
from helpers import tiny_gguf
from helpers.chance import is_torture, seed, times
from helpers.engines import NOISE, TOKENS, evaluate, exported, same

INSERT = TOKENS[500:510]
ROTATED = 0.1
"""Keys are rounded to 16 bits every time they are rotated. A wrong place changes logits by several."""


def opened(request, folder, *, layers: int):
    """Makes engines with a few cells over a model with so many layers."""
    engines = []

    def load(cells: int) -> Engine:
        if request.param == "fake":
            return FakeEngine(cells=cells, context=cells, sequences=4, batch=64)
        if request.param != "hf":
            flash = request.param != "no flash"
            settings = LlamaSettings(context=cells, cells=cells, sequences=4, batch=64, threads=1, flash=flash)
            return LlamaEngine(LlamaModel(model), settings, "digest")
        from emberkeep.engine.hf.engine import HfEngine
        from emberkeep.engine.hf.model_loader import HfSettings

        return HfEngine(model, HfSettings(cells, cells, sequences=4, batch=64, threads=1), "digest")

    def make(cells: int = 1024) -> Engine:
        engines.append(load(cells))
        return engines[-1]

    model = written(request.param, folder, layers)
    yield make
    for engine in engines:
        engine.close()


def written(kind: str, folder, layers: int):
    if kind == "hf":
        from emberkeep.engine.hf.model_loader import HfSource, load_model
        from helpers import tiny_hf

        source = HfSource(tiny_hf.write(folder, layers=layers))
        return load_model(source, device="cpu", dtype="auto", attention="eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf, "LAYERS", layers)
        return getattr(tiny_gguf, "latent" if kind == "latent" else "dense")(folder / "m.gguf")


HF = pytest.param("hf", marks=pytest.mark.slow)


@pytest.fixture(params=["fake", "llama.cpp", "no flash", HF])
def make(request, tmp_path):
    yield from opened(request, tmp_path, layers=2)


@pytest.fixture(params=["llama.cpp", "latent", "no flash", HF])
def make_shallow(request, tmp_path):
    yield from opened(request, tmp_path, layers=1)


@pytest.fixture
def engine(make) -> Engine:
    return make()


def after(start: int, end: int, insert: np.ndarray, length: int) -> np.ndarray:
    """The tokens of a spliced sequence, and some to go on with."""
    return np.concatenate([TOKENS[:start], insert, TOKENS[end:length], TOKENS[600:700]])


def splice(engine: Engine, sequence: int, start: int, end: int, insert: np.ndarray = INSERT) -> None:
    assert engine.splice(sequence, start, end, insert) is Outcome.DONE


# ── what it gives ──


@pytest.mark.parametrize(
    ("start", "end", "length", "inserted"),
    [
        (20, 120, 200, 10),
        (0, 150, 200, 1),
        (1, 2, 200, 1),
        (100, 200, 200, 5),
        (0, 200, 200, 3),
        (20, 30, 200, 40),
        (90, 91, 130, 200),
        (31, 64, 97, 33),
        (199, 200, 200, 1),
    ],
    ids=str,
)
def test_one_layer_is_as_if_the_shorter_text_had_been_evaluated(make_shallow, start, end, length, inserted):
    engine, fresh = make_shallow(), make_shallow()
    insert = TOKENS[500 : 500 + inserted]
    evaluate(engine, 0, 0, length)
    splice(engine, 0, start, end, insert)
    shorter, reached = after(start, end, insert, length), length - end + start + inserted
    expected = evaluate(fresh, 0, 0, reached + 10, shorter)
    assert same(engine, evaluate(engine, 0, reached, reached + 10, shorter), expected, ROTATED)


def test_one_layer_can_be_spliced_again_and_again(make_shallow):
    engine = make_shallow()
    tokens = TOKENS[:300]
    evaluate(engine, 0, 0, 300)
    for start, end in ((10, 60), (100, 105), (12, 13), (0, 90), (100, 140)):
        splice(engine, 0, start, end)
        tokens = np.concatenate([tokens[:start], INSERT, tokens[end:]])
    whole = np.concatenate([tokens, TOKENS[600:610]])
    expected = evaluate(make_shallow(), 0, 0, len(whole), whole)
    assert same(engine, evaluate(engine, 0, len(tokens), len(whole), whole), expected, ROTATED)


def test_a_spliced_sequence_ends_where_it_should(engine):
    evaluate(engine, 0, 0, 200)
    splice(engine, 0, 20, 120)
    engine.export_kv(0, (0, 110)).payloads()
    with pytest.raises(EngineError):
        engine.export_kv(0, (0, 111)).payloads()
    with pytest.raises(EngineError):
        engine.evaluate([Rows(0, 200, TOKENS[:1], outputs=0)])
    assert np.isfinite(evaluate(engine, 0, 110, 120)).all()


def test_what_is_before_the_splice_is_untouched_and_what_is_inserted_is_exact(engine):
    evaluate(engine, 0, 0, 200)
    before = bytes(exported(engine, 0, 0, 20))
    splice(engine, 0, 20, 120)
    assert bytes(exported(engine, 0, 0, 20)) == before
    engine.trim(0, 30)
    shorter = after(20, 30, INSERT, 30)
    assert same(engine, evaluate(engine, 0, 30, 40, shorter), evaluate(engine, 1, 0, 40, shorter))


def test_what_follows_still_depends_on_what_was_spliced_out(engine):
    shorter = after(20, 120, INSERT, 200)
    evaluate(engine, 0, 0, 200)
    splice(engine, 0, 20, 120)
    difference = evaluate(engine, 0, 110, 120, shorter) - evaluate(engine, 1, 0, 120, shorter)
    assert np.abs(difference).max() > 3 * NOISE


def test_nothing_is_approximate_where_nothing_follows(engine):
    shorter = after(20, 200, INSERT, 200)
    evaluate(engine, 0, 0, 200)
    splice(engine, 0, 20, 200)
    assert same(engine, evaluate(engine, 0, 30, 40, shorter), evaluate(engine, 1, 0, 40, shorter))


def test_an_export_right_after_a_splice_holds_what_was_rotated(make):
    engine, other = make(), make()
    evaluate(engine, 0, 0, 200)
    splice(engine, 0, 20, 120)
    for start, end in ((0, 64), (64, 110)):
        assert other.import_kv(0, start, end, [exported(engine, 0, start, end)], start) is Outcome.DONE
    assert other.import_kv(1, 0, 110, [exported(engine, 0, 0, 110)], 0) is Outcome.DONE
    expected = evaluate(engine, 0, 110, 120)
    assert same(engine, evaluate(other, 0, 110, 120), expected)
    assert same(engine, evaluate(other, 1, 110, 120), expected)
    assert exported(other, 0, 0, 110) == exported(engine, 0, 0, 110)


# ── what others notice ──


@pytest.mark.parametrize("inserted", [1, 10, 100, 130])
@pytest.mark.parametrize("source", [0, 1])
def test_those_who_share_all_of_the_state_keep_it(engine, source, inserted):
    """Whichever of them was the first to have it."""
    evaluate(engine, 0, 0, 200)
    engine.copy_kv(0, 1, 200)
    engine.copy_kv(1, 2, 150)
    before = exported(engine, 0, 0, 200)
    splice(engine, source, 20, 120, TOKENS[500 : 500 + inserted])
    assert exported(engine, 1 - source, 0, 200) == before
    assert exported(engine, 2, 100, 150) == exported(engine, 1 - source, 100, 150)
    assert same(engine, evaluate(engine, 1 - source, 200, 210), evaluate(engine, 3, 0, 210))


def test_sequences_that_share_what_is_before_the_splice_keep_it(engine):
    evaluate(engine, 0, 0, 20)
    engine.copy_kv(0, 1, 20)
    evaluate(engine, 0, 20, 200)
    evaluate(engine, 1, 20, 60, TOKENS[::-1].copy())
    before = exported(engine, 1, 0, 60)
    splice(engine, 0, 10, 120)
    assert exported(engine, 1, 0, 60) == before


def test_sequences_that_share_nothing_do_not_notice(make):
    engine, alone = make(), make()
    other = TOKENS[::-1].copy()
    for one in (engine, alone):
        evaluate(one, 1, 0, 60, other)
        evaluate(one, 0, 0, 200)
    splice(engine, 0, 20, 120)
    assert exported(engine, 1, 0, 60) == exported(alone, 1, 0, 60)
    batch = [Rows(0, 110, TOKENS[:3], outputs=1), Rows(1, 60, other[60:70], outputs=1)]
    assert engine.evaluate(batch) is Outcome.DONE
    assert same(engine, engine.logits(1), evaluate(alone, 1, 60, 70, other))


def test_a_branch_of_a_spliced_sequence_is_spliced_alone(make_shallow):
    engine = make_shallow()
    evaluate(engine, 0, 0, 200)
    splice(engine, 0, 20, 120)
    engine.copy_kv(0, 1, 110)
    before = exported(engine, 0, 0, 110)
    splice(engine, 1, 5, 25)
    assert exported(engine, 0, 0, 110) == before
    shorter = np.concatenate([TOKENS[:5], INSERT, INSERT[5:], TOKENS[120:200], TOKENS[600:700]])
    expected = evaluate(engine, 2, 0, 110, shorter)
    assert same(engine, evaluate(engine, 1, 100, 110, shorter), expected, ROTATED)


def test_sequences_that_come_and_go_are_what_their_tokens_give(make_shallow):
    """A long random history of evaluating, copying, splicing and forgetting in few cells."""
    engine, random = make_shallow(cells=512), np.random.default_rng(seed(7))
    known: dict[int, np.ndarray] = {}
    spliced = refused = 0
    for _ in range(times(120)):
        slot = int(random.integers(4))
        tokens = known.get(slot, TOKENS[:0])
        move = random.choice(["go on", "go on", "go on", "copy", "copy", "splice", "splice", "forget"])
        more = random.integers(40, 120, random.integers(1, 60), dtype=np.int32)
        if move == "go on" and len(tokens) < 250:
            if engine.evaluate([Rows(slot, len(tokens), more, outputs=0)]) is Outcome.DONE:
                known[slot] = np.concatenate([tokens, more])
        elif move == "copy" and known and not len(tokens):
            source = int(random.choice(list(known)))
            known[slot] = known[source][: random.integers(1, len(known[source]) + 1)]
            engine.copy_kv(source, slot, len(known[slot]))
        elif move == "splice" and len(tokens) > 1:
            start, end = sorted(random.choice(len(tokens) + 1, 2, replace=False).tolist())
            if engine.splice(slot, start, end, more) is Outcome.DONE:
                known[slot] = np.concatenate([tokens[:start], more, tokens[end:]])
                spliced += 1
            else:
                refused += 1
        elif move == "forget":
            engine.trim(slot, 0)
            known.pop(slot, None)
    assert is_torture() or (spliced > 15 and refused)
    for slot, tokens in known.items():
        last = len(tokens) - 1
        engine.trim(slot, last)
        fresh = make_shallow(cells=512)
        expected = evaluate(fresh, 0, 0, len(tokens), tokens)
        assert same(engine, evaluate(engine, slot, last, len(tokens), tokens), expected, 3 * ROTATED)


# ── what it refuses ──


@pytest.mark.parametrize(
    ("start", "end", "inserted"),
    [(20, 120, 0), (20, 20, 5), (30, 20, 5), (-1, 20, 5), (20, 201, 5), (200, 200, 5)],
    ids=["nothing to insert", "nothing to splice out", "backwards", "before", "beyond", "at the end"],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(engine, start, end, inserted):
    evaluate(engine, 0, 0, 200)
    before = exported(engine, 0, 0, 200)
    with pytest.raises(EngineError):
        engine.splice(0, start, end, TOKENS[:inserted])
    assert exported(engine, 0, 0, 200) == before
    assert same(engine, evaluate(engine, 0, 200, 210), evaluate(engine, 1, 0, 210))


def test_without_room_everything_stays_as_it_was(make):
    engine = make(cells=256)
    evaluate(engine, 0, 0, 150)
    others = filled(engine, 1)
    before = exported(engine, 0, 0, 150), exported(engine, 1, 0, others)
    assert engine.splice(0, 20, 30, TOKENS[500:550]) is Outcome.NO_ROOM
    assert (exported(engine, 0, 0, 150), exported(engine, 1, 0, others)) == before
    splice(engine, 0, 20, 70, TOKENS[500:550])
    assert exported(engine, 1, 0, others) == before[1]


def test_what_is_shared_needs_room_of_its_own(make):
    engine = make(cells=256)
    evaluate(engine, 0, 0, 150)
    engine.copy_kv(0, 1, 150)
    engine.trim(2, filled(engine, 2) - 20)  # for what is inserted, and not for what follows
    before = exported(engine, 0, 0, 150)
    assert engine.splice(0, 20, 120, INSERT) is Outcome.NO_ROOM
    assert exported(engine, 0, 0, 150) == exported(engine, 1, 0, 150) == before
    engine.trim(1, 0)
    splice(engine, 0, 20, 120)


def filled(engine: Engine, sequence: int) -> int:
    """Let it go on until not one more token fits; where it ends."""
    end = 0
    for step in (32, 1):
        while engine.evaluate([Rows(sequence, end, TOKENS[end : end + step], outputs=0)]) is Outcome.DONE:
            end += step
    return end


def test_a_step_that_fails_leaves_nothing_half_done(make_shallow):
    """Such as a token that the model does not have."""
    engine = make_shallow()
    evaluate(engine, 0, 0, 200)
    engine.copy_kv(0, 1, 200)
    before = exported(engine, 1, 0, 200)
    with pytest.raises(StepFailed):
        engine.splice(0, 20, 120, np.array([60, 100_000], np.int32))
    assert exported(engine, 1, 0, 200) == before
    assert same(engine, evaluate(engine, 0, 0, 210), evaluate(engine, 1, 200, 210))
