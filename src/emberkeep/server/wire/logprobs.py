"""Log probabilities in the two shapes that OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence

from emberkeep.types import Json, TokenLogprob

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    """None when there are none."""
    if not tokens:
        return None
    content = [_entry(token) | {"top_logprobs": [_entry(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> Json:
    """`offset`: characters of this choice's text that came before these tokens."""
    if not tokens:
        return None
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(_text(token))
    return {
        "tokens": [_text(token) for token in tokens],
        "token_logprobs": [_finite(token) for token in tokens],
        "top_logprobs": [{_text(other): _finite(other) for other in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _entry(token: TokenLogprob) -> dict[str, Json]:
    return {"token": _text(token), "logprob": _finite(token), "bytes": list(token.piece)}


def _text(token: TokenLogprob) -> str:
    return token.piece.decode("utf-8", "replace")


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, _LOWEST)
