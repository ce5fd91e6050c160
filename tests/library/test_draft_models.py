"""A draft model, from the setting to the answer: in llama.cpp and in the Hugging Face engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeVocab
from emberkeep.errors import ConfigError, EngineError, ModelNotFound
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.runtime.local_model import vocab_difference
from emberkeep.sched.draft_model import DraftModel
from emberkeep.sched.drafts import StepCost
from helpers import tiny_gguf

PROMPT = "The quick brown fox jumps over the lazy dog, and then it jumps over it again. " * 3


@pytest.fixture(autouse=True)
def steps_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever may be drafted is: these models are too small for steps that cost something."""
    monkeypatch.setattr(StepCost, "cost", lambda self, drafted: 1.0)
    monkeypatch.setattr(DraftModel, "seconds", lambda self, rows, depth: 0.0)
    monkeypatch.setattr(DraftModel, "lag_seconds", lambda self, target: 0.0)


def gguf(folder: Path, *, seed: int = 0, name: str = "model") -> Path:
    return tiny_gguf.dense(folder / f"{name}.gguf", seed=seed)


def hf(folder: Path, *, seed: int = 0, name: str = "model") -> Path:
    from helpers import tiny_hf

    return tiny_hf.write(folder / name, seed=seed, layers=3 if name == "model" else 2)


Make = Callable[..., Path]
KINDS = [pytest.param(gguf, id="llamacpp"), pytest.param(hf, id="hf", marks=pytest.mark.slow)]


def config(folder: Path, model: Path, draft: Path | None = None) -> Config:
    named = str(draft) if draft else "auto"
    return Config(model=str(model), speculation=named, data_dir=folder / "data", ctx=512, parallel=2, device="cpu")


def answers(config: Config) -> list[tuple[int, ...]]:
    with Emberkeep.open(config) as llm:
        greedy = llm.generate(PROMPT, max_tokens=24, temperature=0)
        seeded = llm.generate(PROMPT, max_tokens=24, temperature=1.0, seed=5)
        return [greedy.tokens, seeded.tokens]


@pytest.mark.parametrize("make", KINDS)
def test_the_text_is_that_of_the_model(make: Make, tmp_path: Path) -> None:
    model, draft = make(tmp_path), make(tmp_path, seed=1, name="small")
    plain = answers(replace(config(tmp_path / "plain", model), speculation="off"))
    assert answers(config(tmp_path / "drafted", model, draft)) == plain


@pytest.mark.parametrize("make", KINDS)
def test_it_drafts_and_is_told_of(make: Make, tmp_path: Path) -> None:
    model, draft = make(tmp_path), make(tmp_path, seed=1, name="small")
    with Emberkeep.open(config(tmp_path, model, draft)) as llm:
        assert llm.card.details["draft_model"] == "small"
        llm.generate(PROMPT, max_tokens=24, temperature=0)
        stats = llm.speculative_stats()
    assert stats.draft_model.name == "small"
    assert not stats.draft_model.reason
    assert stats.draft_model.evaluated_tokens > len(PROMPT) / 8
    assert stats.sources["model"].drafted_tokens > 0


@pytest.mark.parametrize("make", KINDS)
def test_its_state_is_there_after_a_restart_until_the_user_is_forgotten(make: Make, tmp_path: Path) -> None:
    model, draft = make(tmp_path), make(tmp_path, seed=1, name="small")
    evaluated = []
    for _ in range(3):
        with Emberkeep.open(config(tmp_path, model, draft)) as llm:
            llm.generate(PROMPT, max_tokens=24, temperature=0, user="ann")
            evaluated.append(llm.speculative_stats().draft_model.evaluated_tokens)
            if len(evaluated) == 2:
                llm.cache.remove_user("ann")
    assert evaluated[1] < evaluated[0] / 2
    assert evaluated[2] == evaluated[0]


# ── what cannot be ──


def test_a_draft_model_that_is_not_here_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"small\.gguf"):
        Emberkeep.open(config(tmp_path, gguf(tmp_path), tmp_path / "small.gguf"))


def test_the_model_itself_is_no_draft_model(tmp_path: Path) -> None:
    model = gguf(tmp_path)
    with pytest.raises(ConfigError, match="is the model itself: choose a smaller one"):
        Emberkeep.open(config(tmp_path, model, model))


def test_one_with_snapshots_is_refused(tmp_path: Path) -> None:
    draft = tiny_gguf.recurrent(tmp_path / "small.gguf")
    with pytest.raises(EngineError, match=r"cannot go back by single tokens.*: choose one with attention only"):
        Emberkeep.open(config(tmp_path, gguf(tmp_path), draft))


@pytest.mark.slow
def test_one_of_the_other_engine_is_refused(tmp_path: Path) -> None:
    draft = hf(tmp_path, name="small")
    with pytest.raises(ConfigError, match=r"in llama\.cpp and its draft model in the Hugging Face engine: choose"):
        Emberkeep.open(config(tmp_path, gguf(tmp_path), draft))


@pytest.mark.slow
def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    draft = hf(tmp_path, name="small")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    swap = {"a": "b", "b": "a"}
    letters = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {swap.get(letter, letter): token for letter, token in letters.items()}
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EngineError, match=r"another vocabulary than the model: token 64 is b'b' and not b'a'\."):
        Emberkeep.open(config(tmp_path, hf(tmp_path), draft))


class ChangedVocab(FakeVocab):
    def __init__(self, **changes: object) -> None:
        super().__init__()
        for name, value in changes.items():
            setattr(self, name, value)


VOCAB = FakeVocab()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"pieces": VOCAB.pieces[:-1]}, "it has 274 tokens and not 275"),
        ({"pieces": (b"x", *VOCAB.pieces[1:])}, r"token 0 is b'x' and not b'\x00'"),
        (
            {"specials": {**VOCAB.specials, "<|im_end|>": 272}},
            f"'<|im_end|>' is token 272 and not {VOCAB.specials['<|im_end|>']}",
        ),
        ({"specials": {}}, "'<|endoftext|>' is token None and not 272"),
        ({"eog": frozenset({1})}, f"an answer ends with tokens [1] and not {sorted(VOCAB.eog)}"),
        ({"bos": 5}, "a text begins with token 5 and not None"),
    ],
)
def test_every_difference_of_vocabularies_is_told(changes: dict[str, object], said: str | None) -> None:
    assert vocab_difference(VOCAB, ChangedVocab(**changes)) == said
