"""Between messages and token ids, and between sampled tokens and events: text only, no engine, no store."""
