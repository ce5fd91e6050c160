"""The Python library: load a model, generate, chat, warm, verify, remember."""
