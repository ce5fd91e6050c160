"""How models mark what they think before they answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    start: str
    end: str


REASONING = (
    Reasoning("<think>", "</think>"),
    Reasoning("<thinking>", "</thinking>"),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<mm:think>", "</mm:think>"),
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    Reasoning("<|channel>thought", "<channel|>"),
    Reasoning("<unused94>thought", "<unused95>"),
    Reasoning("<|channel|>analysis<|message|>", "<|end|>"),
)


def open_reasoning(prompt: str) -> Reasoning | None:
    """The block that the prompt itself has opened, if it ends with a start marker."""
    prompt = prompt[-80:].rstrip()
    return next((block for block in REASONING if prompt.endswith(block.start)), None)
