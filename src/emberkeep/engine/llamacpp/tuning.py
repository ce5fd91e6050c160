"""Whether flash attention can be off, and how long steps take with it and without: measured once a model is loaded
and nothing waits for it, in contexts of their own, and remembered by library, CPU, model and number of threads.

Where both are possible the engine goes from one to the other as work demands (`flash_switch`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from emberkeep.config.machine import total_ram
from emberkeep.engine.facts import Facts
from emberkeep.engine.idle_steps import Interrupted
from emberkeep.engine.llamacpp.context import LlamaSettings, Tuning, available_cores, score_bytes
from emberkeep.engine.llamacpp.facts import facts_about
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import llama
from emberkeep.engine.llamacpp.step_timing import Measured, measure
from emberkeep.engine.llamacpp.trial import survives_without_flash
from emberkeep.errors import EngineError
from emberkeep.values import dataclass

logger = logging.getLogger("emberkeep.engine")

_MOST_SCORES = 1 << 30
_SHARE_OF_SCORES = 16
"""At most this part of RAM."""
_LEAST_BATCH = 128
_SMALLEST = 16 << 20
"""Bytes of a model from which on it is worth the time."""


def tune(
    model: LlamaModel, settings: LlamaSettings, weights_digest: str, flash: bool | None, folder: Path | None = None
) -> tuple[LlamaSettings, Tuning]:
    """`settings` with flash attention as `flash` says, or as a choice for every step; and what is known of its
    times.

    Never an error: where nothing can be found out, flash attention is on. What was not measured yet is measured
    by the result's `measure`, and remembered in `folder`.
    """
    ways, reason = [flash is not False], "as asked"
    if not flash and (needed := _why_needed(model, settings, weights_digest, is_asked=flash is False)):
        ways, reason = [True], needed
    elif flash is None:
        ways, reason = [True, False], "what is quicker, step by step"
    logger.debug("flash attention: %s", reason)
    if False in ways:
        batch = batch_without_flash(model, settings) or max(_LEAST_BATCH, settings.sequences)
        settings = replace(settings, flash=ways[0], batch=batch)
    subject = Subject(weights_digest, settings.threads, settings.kv_type, model.placement)
    return settings, Results(model, settings, subject, folder).tuning(ways, reason)


def _why_needed(model: LlamaModel, settings: LlamaSettings, weights_digest: str, *, is_asked: bool) -> str | None:
    """Why flash attention cannot be off; `is_asked`: although it should be."""
    if settings.kv_type != "f16":
        return f"{settings.kv_type} values need it"
    if model.offloads:
        return "layers are on a GPU"
    if not is_asked and llama().llama_model_size(model.handle) < _SMALLEST:
        return "the model is small"
    if not is_asked and batch_without_flash(model, settings) is None:
        return f"without it {settings.cells} tokens of context would take too much memory"
    if not survives_without_flash(model.path, weights_digest):
        return "the model does not run without it"
    return None


def batch_without_flash(model: LlamaModel, settings: LlamaSettings) -> int | None:
    """The most rows of a step whose scores have room: one for each row, cell and head. None if that is too few.

    On a CPU a prompt in steps of 128 tokens is no slower than in steps of 512.
    """
    # Not of what is free now: what is stored is of use only while the answer stays the same.
    room = min(_MOST_SCORES, total_ram() // _SHARE_OF_SCORES)
    of_a_row = score_bytes(model, replace(settings, batch=1))
    smaller = (batch for batch in (256, _LEAST_BATCH) if settings.sequences <= batch < settings.batch)
    return next((batch for batch in (settings.batch, *smaller) if batch * of_a_row <= room), None)


@dataclass(frozen=True, slots=True)
class Subject:
    """What it was that was measured, with the library in use and on this CPU."""

    weights_digest: str
    threads: int | None
    kv_type: str
    placement: object = "CPU"

    def measured(self, flash: bool, folder: Path | None) -> Measured | None:
        """None where nothing is remembered that can be read."""
        return self._facts(folder).read_json(f"steps {flash}", Measured.from_json)

    def is_measured(self, folder: Path | None = None) -> bool:
        """Whether both ways were. Raises EngineError."""
        return all(self.measured(flash, folder) is not None for flash in (True, False))

    def remember(self, flash: bool, measured: Measured, folder: Path | None) -> None:
        self._facts(folder).remember_json(f"steps {flash}", measured.json())

    def _facts(self, folder: Path | None) -> Facts:
        about = (self.weights_digest, self.threads or available_cores(), self.kv_type, self.placement)
        return facts_about(*about, folder=folder)


class Results:
    """What was measured of a model before, or is measured now."""

    def __init__(
        self, model: LlamaModel, settings: LlamaSettings, subject: Subject, folder: Path | None = None
    ) -> None:
        self._model = model
        self._settings = settings
        self._subject = subject
        self._folder = folder

    def tuning(self, ways: Sequence[bool], reason: str) -> Tuning:
        """What is known of `ways`, with flash attention or without."""
        found = {way: self._subject.measured(way, self._folder) for way in ways}
        known = {way: measured for way, measured in found.items() if measured is not None}

        def measure(is_wanted: Callable[[], bool]) -> Tuning | None:
            try:
                return self._tuning(ways, reason, known | self._measure(ways, known, is_wanted))
            except Interrupted:
                return None

        # What was measured beside other programs is measured again at the next start, and what is less counts.
        is_enough = len(known) == len(ways) and all(each.is_whole for each in known.values())
        return self._tuning(ways, reason, known, None if is_enough or self._is_small else measure)

    def _tuning(
        self,
        ways: Sequence[bool],
        reason: str,
        known: Mapping[bool, Measured],
        measure: Callable[[Callable[[], bool]], Tuning | None] | None = None,
    ) -> Tuning:
        tables = {way: known[way].table for way in ways if way in known}
        wide_rows = known[False].wide_rows if False in known else None
        return Tuning(reason, tables, wide_rows, has_choice=len(ways) > 1, measure=measure)

    @property
    def _is_small(self) -> bool:
        return bool(llama().llama_model_size(self._model.handle) < _SMALLEST)

    def _measure(
        self, ways: Sequence[bool], known: Mapping[bool, Measured], is_wanted: Callable[[], bool]
    ) -> dict[bool, Measured]:
        """All of `ways` side by side. Raises Interrupted."""
        try:
            measured = measure(self._model, [replace(self._settings, flash=way) for way in ways], is_wanted)
        except EngineError as error:
            logger.warning("how long steps take could not be measured: %s", error)
            return {}
        found = dict(zip(ways, measured, strict=True))
        found |= {way: known[way].join(new) for way, new in found.items() if way in known}
        for way, new in found.items():
            self._subject.remember(way, new, self._folder)
        return found
