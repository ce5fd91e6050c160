"""What a scheduler counts."""

from __future__ import annotations

from emberkeep.sched.sequence import Sequence
from emberkeep.types.events import Source
from emberkeep.values import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    jobs: int = 0
    cancelled: int = 0
    failed: int = 0
    steps: int = 0
    evaluated_tokens: int = 0
    prompt_tokens: int = 0
    reused_hot_tokens: int = 0
    reused_warm_tokens: int = 0
    reused_cold_tokens: int = 0
    reused_remote_tokens: int = 0
    moved_tokens: int = 0
    repaired_tokens: int = 0
    approximate_jobs: int = 0
    blended_tokens: int = 0
    """In steps into which state was moved, of which the next one is what they cost."""
    blended_token_layers: int = 0
    cuts: int = 0
    """How often something was cut out of a sequence's state."""
    sampled_tokens: int = 0
    saved_s: float = 0.0
    """What evaluating all that was reused would have taken, less what loading it took."""

    def count(self, sequence: Sequence) -> None:
        """A sequence that was in the engine is over."""
        reuse = sequence.reuse
        self.prompt_tokens += sequence.prompt_length
        tokens = reuse.by_source()
        self.reused_hot_tokens += tokens[Source.HOT]
        self.reused_warm_tokens += tokens[Source.WARM]
        self.reused_cold_tokens += tokens[Source.COLD]
        self.reused_remote_tokens += tokens[Source.REMOTE]
        self.moved_tokens += tokens[Source.MOVED]
        self.cuts += sequence.splices
        self.evaluated_tokens += sequence.inserted_tokens
        self.repaired_tokens += reuse.repaired
        self.approximate_jobs += sequence.approximate_from is not None
