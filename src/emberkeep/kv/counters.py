"""What the store has done since it was opened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StoreCounters:
    lookups: int = 0
    inserted_chunks: int = 0
    read_chunks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    """From disk into RAM."""
    import_seconds: float = 0.0
    """From RAM into the engine."""
    damaged_chunks: int = 0
    vanished_chunks: int = 0
    unreadable_chunks: int = 0
    """Reads that failed in a way that may pass."""
    warm_evictions: int = 0
    cooled_by_turns: int = 0
    cooled_when_idle: int = 0
    cold_evictions: int = 0
    expired_evictions: int = 0
    removed_chunks: int = 0

    def evictions(self) -> dict[str, dict[str, int]]:
        """Chunks that left each tier, by reason."""
        return {
            "warm": {
                "pressure": self.warm_evictions,
                "turns": self.cooled_by_turns,
                "idle": self.cooled_when_idle,
            },
            "cold": {
                "budget": self.cold_evictions,
                "expired": self.expired_evictions,
                "removed": self.removed_chunks,
            },
        }
