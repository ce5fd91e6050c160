"""What was learned of a model is remembered, used at once, and never taken for what was learned of another."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.engine.facts import Facts
from emberkeep.engine.llamacpp import learning, shared_library, trial, vocab
from emberkeep.engine.llamacpp.context import LlamaSettings
from emberkeep.engine.llamacpp.engine import LlamaEngine
from emberkeep.engine.llamacpp.learning import Learned, StateFacts
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import facts_about, library_in_use
from emberkeep.engine.llamacpp.tuning import Tuning
from emberkeep.errors import EngineError
from helpers.engines import KINDS, evaluate


def test_a_fact_is_found_by_the_next_one_who_asks(tmp_path: Path) -> None:
    Facts(tmp_path, "weights", 4).remember("times", b"fast")
    assert Facts(tmp_path, "weights", 4).read("times") == b"fast"
    assert Facts(tmp_path, "weights", 4).read("layout") is None


@pytest.mark.parametrize("about", [("weights", 5), ("others", 4), ("weights",), ("weights", 4, "more")])
def test_another_subject_finds_nothing(tmp_path: Path, about: tuple[object, ...]) -> None:
    Facts(tmp_path, "weights", 4).remember("times", b"fast")
    assert Facts(tmp_path, *about).read("times") is None


def test_what_is_forgotten_is_learned_anew(tmp_path: Path) -> None:
    facts = Facts(tmp_path, "weights")
    facts.remember("times", b"fast")
    facts.forget("times")
    facts.forget("times")
    assert facts.read("times") is None


def test_a_damaged_file_says_nothing(tmp_path: Path) -> None:
    facts = Facts(tmp_path, "weights")
    facts.remember_json("times", [1, 2])
    (file,) = tmp_path.iterdir()
    for damaged in (b"", file.read_bytes()[:-1], file.read_bytes() + b" "):
        file.write_bytes(damaged)
        assert facts.read_json("times", list) is None


@pytest.mark.parametrize("error", [ValueError, KeyError, TypeError])
def test_what_another_version_has_written_says_nothing(tmp_path: Path, error: type[Exception]) -> None:
    def parse(data: object) -> object:
        raise error

    facts = Facts(tmp_path, "weights")
    facts.remember_json("times", [1, 2])
    assert facts.read_json("times", parse) is None
    facts.remember("times", b"no json")
    assert facts.read_json("times", list) is None


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    facts = Facts(tmp_path / "file" / "facts", "weights")
    facts.remember("times", b"fast")
    assert facts.read("times") is None


def test_without_a_folder_nothing_is_remembered() -> None:
    facts = Facts(None, "weights")
    facts.remember("times", b"fast")
    facts.forget("times")
    assert facts.read("times") is None


SETTINGS = LlamaSettings(context=512, cells=512, sequences=4, batch=256, threads=1)

CHOICE = Tuning("", has_choice=True)


def open_engine(path: Path, folder: Path, settings: LlamaSettings = SETTINGS) -> LlamaEngine:
    known = facts_about("digest", folder=folder)
    return LlamaEngine(LlamaModel(path, facts=known), settings, "digest", CHOICE, known)


# ── a file for each fact ──
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("digest", lambda library: "another library at the same path"),
        ("cpu_facts", lambda **_: ("another CPU",)),
        ("loader_variables", lambda: ["LD_PRELOAD=other.so"]),
    ],
)
def test_another_library_cpu_or_loader_finds_nothing(tmp_path: Path, monkeypatch, name: str, other) -> None:
    facts_about("weights", folder=tmp_path).remember("steps", b"fast")
    monkeypatch.setattr(shared_library, name, other)
    assert facts_about("weights", folder=tmp_path).read("steps") is None


# ── how state lies ──
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_learned_of_state_survives_being_written_down(model_file, kind: str) -> None:
    model = LlamaModel(model_file(kind))
    learned = StateFacts(None, model, SETTINGS, both=True).learned()
    assert Learned.from_json(json.loads(json.dumps(learned.json()))) == learned
    assert repr(Learned.from_json(json.loads(json.dumps(learned.json())))) == repr(learned)
    model.close()


def test_the_second_start_evaluates_nothing(model_file, tmp_path: Path, monkeypatch) -> None:
    first = open_engine(model_file("dense"), tmp_path)
    monkeypatch.setattr(learning, "_learn", None)
    monkeypatch.setattr(vocab, "_read_tokens", None)
    second = open_engine(model_file("dense"), tmp_path)
    assert second.fingerprint == first.fingerprint
    assert second.capabilities == first.capabilities
    assert second.vocab.pieces == first.vocab.pieces
    assert second.vocab.eog == first.vocab.eog
    assert second.vocab.specials == first.vocab.specials
    assert (evaluate(second, 0, 0, 40) == evaluate(first, 0, 0, 40)).all()
    for engine in (first, second):
        engine.close()


def test_other_settings_are_learned_anew(model_file, tmp_path: Path, monkeypatch) -> None:
    open_engine(model_file("dense"), tmp_path).close()
    learned = []
    learn = learning._learn
    monkeypatch.setattr(learning, "_learn", lambda *about, **more: learned.append(1) or learn(*about, **more))
    open_engine(model_file("dense"), tmp_path, replace(SETTINGS, flash=False)).close()
    assert learned
    learned.clear()
    open_engine(model_file("dense"), tmp_path, replace(SETTINGS, cells=256, context=256)).close()
    assert not learned


def test_a_layout_that_is_wrong_is_noticed_before_anything_is_stored(model_file, tmp_path: Path) -> None:
    """As if a fact could get under the name of another model's."""
    model = LlamaModel(model_file("wide"))
    learned = StateFacts(None, model, SETTINGS, both=True).learned()
    model.close()
    right = open_engine(model_file("dense"), tmp_path)
    expected = evaluate(right, 0, 0, 40)
    right.close()
    known = facts_about("digest", folder=tmp_path)
    what = StateFacts(known, right._model, SETTINGS, both=True)._what(both=True)
    assert known.read(what) is not None
    known.remember(what, json.dumps(learned.json()).encode())
    engine = open_engine(model_file("dense"), tmp_path)
    assert (evaluate(engine, 0, 0, 40) == expected).all()
    with pytest.raises(EngineError, match="not as it was remembered"):
        engine.export_kv(0, (0, 40))
    assert known.read(what) is None
    engine.close()


def test_a_snapshot_that_is_not_as_remembered_is_forgotten_too(model_file, tmp_path: Path) -> None:
    right = open_engine(model_file("recurrent"), tmp_path)
    right.close()
    known = facts_about("digest", folder=tmp_path)
    what = StateFacts(known, right._model, SETTINGS, both=True)._what(both=True)
    altered = json.loads(known.read(what))
    altered["layout"]["recurrent"][1][0][1] *= 2
    known.remember(what, json.dumps(altered).encode())
    engine = open_engine(model_file("recurrent"), tmp_path)
    evaluate(engine, 0, 0, 40)
    with pytest.raises(EngineError, match="not as it was remembered"):
        engine.export_snapshot(0)
    assert known.read(what) is None
    engine.close()


# ── tokens ──
def test_remembered_tokens_that_differ_from_the_librarys_are_read_anew(model_file, tmp_path: Path) -> None:
    known = facts_about("digest", folder=tmp_path)
    model = LlamaModel(model_file("dense"), facts=known)
    pieces = model.vocab.pieces
    tokens = vocab._Tokens.from_bytes(known.read(vocab._TOKENS))
    assert tokens.pieces == pieces
    known.remember(vocab._TOKENS, replace(tokens, pieces=(b"other", *pieces[1:])).to_bytes())
    again = LlamaModel(model_file("dense"), facts=known)
    assert again.vocab.pieces == pieces
    for each in (model, again):
        each.close()


@pytest.mark.parametrize("fact", [b"", b"\1\0\0\0", b"\xff" * 64])
def test_tokens_that_are_none_are_read_anew(model_file, tmp_path: Path, fact: bytes) -> None:
    known = facts_about("digest", folder=tmp_path)
    known.remember(vocab._TOKENS, fact)
    model = LlamaModel(model_file("dense"), facts=known)
    assert len(model.vocab.pieces) == model.vocab.size
    model.close()


@pytest.mark.slow
def test_what_a_trial_learns_the_start_after_it_need_not_learn(
    model_file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child remembers it where the parent looks for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = model_file("dense")
    done = trial._try_all(60, library_in_use().path, path, ["writes", "no flash"], lambda: "of this test")
    assert done == (["writes", "no flash"], None)
    monkeypatch.setattr(learning, "_try_layout", lambda *_: pytest.fail("it was learned again"))
    model = LlamaModel(path)
    assert StateFacts(facts_about("of this test"), model, SETTINGS, both=True).learned().other is not None
    model.close()


@pytest.mark.slow
def test_a_trial_whose_start_has_ended_loads_nothing(model_file) -> None:
    library, path = str(library_in_use().path), str(model_file("dense"))
    program = [sys.executable, "-c", f"from {trial.__name__} import main; main()", library, path, "writes"]
    done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1 and not done.stdout
