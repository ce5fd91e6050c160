"""JSON in, JSON out: request bodies to `types.Request`, events and errors to OpenAI's shapes."""
