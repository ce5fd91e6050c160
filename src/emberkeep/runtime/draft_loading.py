"""What a draft model needs to draft for another: the same engine, the same vocabulary, and room beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from emberkeep.config.settings import Config, placed_by_itself
from emberkeep.engine.base import Engine
from emberkeep.errors import ConfigError, EngineError
from emberkeep.types.models import Vocab

_SHOWN = 24
"""Bytes of a token in an error."""


def config_of_draft(config: Config, draft: str) -> Config:
    """What a draft model is opened with: no adapters, and placed by itself, whatever is said of the other one."""
    return replace(placed_by_itself(config), model=draft, pooling="auto")


def check_files(model: Path, draft: Path) -> None:
    """Raises ConfigError."""
    if draft.resolve() == model.resolve():
        raise ConfigError("The draft model is the model itself: choose a smaller one.")


def check_engines(*, hf: bool, draft_hf: bool) -> None:
    """Raises ConfigError unless one engine runs both."""
    if hf != draft_hf:
        here, there = ("the Hugging Face engine", "llama.cpp") if hf else ("llama.cpp", "the Hugging Face engine")
        raise ConfigError(
            f"The model runs in {here} and its draft model in {there}: choose a draft model of the same kind."
        )


def check_draft(engine: Engine, draft: Engine) -> None:
    """Raises EngineError for a model that cannot draft for the engine's."""
    if draft.fingerprint == engine.fingerprint:
        raise EngineError("The draft model has the weights of the model itself: choose a smaller one.")
    if draft.capabilities.kv_unit.has_snapshots:
        raise EngineError(
            "The draft model's state cannot go back by single tokens, as it must where a draft is wrong: "
            "choose one with attention only."
        )
    if difference := vocab_difference(engine.vocab, draft.vocab):
        raise EngineError(
            f"The draft model has another vocabulary than the model: {difference}. Choose one of the same family."
        )


def vocab_difference(vocab: Vocab, draft: Vocab) -> str | None:
    """The first thing in which they differ, as a part of a sentence; None: a token means the same in both."""
    if len(draft.pieces) != len(vocab.pieces):
        return f"it has {len(draft.pieces):,} tokens and not {len(vocab.pieces):,}"
    for token, (mine, its) in enumerate(zip(vocab.pieces, draft.pieces, strict=True)):
        if mine != its:
            return f"token {token:,} is {its[:_SHOWN]!r} and not {mine[:_SHOWN]!r}"
    for text in sorted({*vocab.specials, *draft.specials}):
        if draft.specials.get(text) != vocab.specials.get(text):
            return f"{text[:_SHOWN]!r} is token {draft.specials.get(text)} and not {vocab.specials.get(text)}"
    if draft.eog != vocab.eog:
        return f"an answer ends with tokens {sorted(draft.eog)} and not {sorted(vocab.eog)}"
    if draft.bos != vocab.bos:
        return f"a text begins with token {draft.bos} and not {vocab.bos}"
    return None
