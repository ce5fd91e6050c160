"""How much `gpu` measures."""

from __future__ import annotations

from dataclasses import dataclass, replace

PARTS = ("memory", "prompts", "transfer", "turns", "decode", "speculation", "streaming", "streamed_drafts")


@dataclass(frozen=True, slots=True)
class GpuPlan:
    parts: tuple[str, ...] = PARTS
    engine: str = "hf"
    """`hf` or `llamacpp`."""
    device: str = "auto"
    layers: int = 36
    hidden: int = 2048
    tokens: tuple[int, ...] = (16_384,)
    """Prompts of which everything is stored."""
    batches: tuple[int, ...] = (1, 8)
    decoded_after: int = 1024
    """Tokens that a sequence has when its decode steps are timed."""
    steps: int = 64
    draft_layers: int = 4
    drafted_for: int = 256
    """Tokens of an answer with a draft model."""
    streamed_layers: int = 64
    streamed_hidden: int = 5120
    """Those of a model in four bits, and what it may take of the device in all."""
    streamed_memory: int = 12_000_000_000
    streamed_steps: int = 16
    streamed_tokens: int = 64
    streamed_repeat: int = 2
    draft_right: tuple[float, ...] = (1.0, 0.9, 0.8)
    """Shares of what a draft model says that are left as it says it."""
    turns: int = 8
    first_tokens: int = 4096
    turn_tokens: int = 256
    answer_tokens: int = 32
    requests: int = 40
    """They have different lengths, whose memory is predicted."""
    slice: int = 4096
    """Most prompt tokens in one step."""
    repeat: int = 5

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        talk = self.first_tokens + self.turns * (self.turn_tokens + self.answer_tokens)
        return max(*self.tokens, talk, self.decoded_after + self.steps) + self.answer_tokens

    def quick(self) -> GpuPlan:
        return replace(
            self,
            layers=4,
            hidden=64,
            tokens=(512,),
            decoded_after=64,
            steps=4,
            draft_layers=1,
            streamed_layers=4,
            streamed_hidden=256,
            streamed_steps=2,
            streamed_tokens=8,
            streamed_repeat=1,
            drafted_for=32,
            turns=3,
            first_tokens=256,
            turn_tokens=32,
            answer_tokens=4,
            requests=30,
            slice=256,
            repeat=1,
        )
