"""Certificates, read once: that takes longer than many an answer."""

from __future__ import annotations

import ssl
from functools import cache

import httpx


@cache
def trusted() -> ssl.SSLContext:
    """As httpx itself would make it."""
    return httpx.create_ssl_context()
