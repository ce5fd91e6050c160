"""Conversations that are longer than the context: what leaves, what is said about it, what comes back."""
