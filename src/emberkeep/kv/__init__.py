"""The KV store: what has been evaluated, kept in RAM and on disk, found again token by token.

It knows nothing about models: a payload is a buffer of an engine's own bytes.
"""
