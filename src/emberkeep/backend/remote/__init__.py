"""Models that somebody else serves."""
