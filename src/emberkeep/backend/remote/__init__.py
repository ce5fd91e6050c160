"""Models that run elsewhere."""
