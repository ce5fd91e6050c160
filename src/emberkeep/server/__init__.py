"""The HTTP server: OpenAI's endpoints over any `Backend`. It never sees an engine, a cache or a scheduler."""
