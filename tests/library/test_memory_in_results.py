"""A result tells what left the context and what came back."""

from __future__ import annotations

from dataclasses import replace

from emberkeep.library.emberkeep import Emberkeep
from emberkeep.types.events import Completed, Eviction, Fit
from helpers.scripted_backend import ScriptedBackend, answer


def test_a_result_tells_what_left_the_context_and_what_came_back() -> None:
    *steps, completed = answer("x")
    assert isinstance(completed, Completed)
    left = (Eviction(messages=4, tokens=300, out=10),)
    told = replace(completed, fit=Fit(evictions=left, recalled=2))
    with Emberkeep(ScriptedBackend(lambda request: [*steps, told])) as llm:
        result = llm.chat("hi")
    assert (result.evictions, result.recalled) == (left, 2)
