"""The scheduler: the only place that sees both the engine and the KV store."""
