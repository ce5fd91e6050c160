"""Keys, tokens and passwords become `[secret]` before a turn, an answer or a title is written.

Saved conversations and responses are continued word by word, and are kept as they are.
"""

from __future__ import annotations

import re

MARK = "[secret]"

_KIND = r"(?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?"
_PEM = rf"-----BEGIN {_KIND}-----.*?(?:-----END {_KIND}-----|\Z)"
_TOKENS = (
    r"sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}",  # OpenAI, Anthropic and others that use the same form
    r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,}",  # Stripe
    r"gh[pousr]_[A-Za-z0-9]{30,}",
    r"github_pat_[A-Za-z0-9_]{30,}",
    r"glpat-[A-Za-z0-9_-]{20,}",
    r"xox[abeoprs]-[A-Za-z0-9-]{10,}",
    r"xai-[A-Za-z0-9]{40,}",
    r"gsk_[A-Za-z0-9]{40,}",
    r"hf_[A-Za-z0-9]{30,}",
    r"npm_[A-Za-z0-9]{36}",
    r"pypi-[A-Za-z0-9_-]{50,}",
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",
    r"AIza[A-Za-z0-9_-]{35}",
    r"ya29\.[A-Za-z0-9_-]{20,}",
    r"SG\.[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{20,}",
    r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",  # a JWT: two JSON objects and a signature
)
_WHOLE = re.compile(rf"{_PEM}|(?<![A-Za-z0-9_-])(?:{'|'.join(_TOKENS)})[A-Za-z0-9_-]*", re.DOTALL)

# What follows keeps its surroundings: only the group `secret` goes.
_HEADER = r"\b(?:Bearer|Basic)\s+(?P<header>[A-Za-z0-9._~+/=-]{16,})"
_URL = r"\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@\[\]]{0,256}:(?P<url>[^\s/@\[\]]{1,256})@"
_NAMES = r"""(?:api|access|secret|private|auth|encryption|signing|client)[_-]?(?:key|token|secret)
           | (?:access|auth|refresh|bearer|session)[_-]?token | client[_-]?secret | secret
           | pass(?:word|wd|phrase)? | pwd"""
_ASSIGNED = re.compile(
    rf"""(?ix) (?<![A-Za-z]) (?:{_NAMES}) ["']? (?:\s+is)? \s{{0,8}} (?:=>|:=|=|:|(?<=\sis)) \s{{0,8}}
         (?: "(?P<double>[^"\n]{{4,}})" | '(?P<single>[^'\n]{{4,}})' | (?P<bare>[^\s"'`,;()\[\]{{}}<>$]{{6,}}) )"""
)
_PARTLY = re.compile(rf"{_HEADER}|{_URL}")

_BEGINNINGS = """
private|sk-|_live_|_test_|ghp_|gho_|ghu_|ghs_|ghr_|github_pat_|glpat-|xox|xai-|gsk_|hf_|npm_|pypi-|akia|asia|aiza|ya29|sg.|eyj
"""
_RULES = (
    (tuple(_BEGINNINGS.strip().split("|")), _WHOLE),
    (("bearer", "basic", "://"), _PARTLY),
    (("key", "token", "secret", "pass", "pwd"), _ASSIGNED),
)
"""Patterns, each with words without one of which it cannot match: looking for those takes no time."""


def redact(text: str) -> str:
    """Idempotent. What only looks random (hashes, UUIDs, images) stays."""
    lowered, without = text.lower(), text
    for words, pattern in _RULES:
        if any(word in lowered for word in words):
            without = pattern.sub(_remove_secret, without)
    # What stood next to a secret may be one by itself.
    return text if without == text else redact(without)


def _remove_secret(match: re.Match[str]) -> str:
    name = next((name for name, value in match.groupdict().items() if value is not None), 0)
    if not _is_secret(name, match[name]):
        return match[0]
    begin, end = (place - match.start() for place in match.span(name))
    return match[0][:begin] + MARK + match[0][end:]


def _is_secret(name: str | int, value: str) -> bool:
    """A word after `password:` in a sentence, or a call in a program, is none."""
    if value == MARK:
        return False
    return name != "bare" or (any(c.isdigit() for c in value) and any(c.isalpha() for c in value))
