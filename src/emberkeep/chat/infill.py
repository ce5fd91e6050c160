"""Filling in the middle: the prompt that asks for the text between a beginning and an end.

Which tokens stand around the two parts is learned from the vocabulary: models for code are trained with one of a
few sets of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from emberkeep.chat.prompt_tokens import SeamedText
from emberkeep.errors import InvalidField
from emberkeep.types.models import Vocab
from emberkeep.types.request import Infill
from emberkeep.values import dataclass

Quote = Callable[[str], SeamedText]
"""Makes of a text one in which no special token is recognised."""


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The texts of special tokens. Empty: the vocabulary has none."""

    prefix: str
    suffix: str
    middle: str
    file: str = ""
    """Stands before each file of the same repository."""
    suffix_first: bool = False

    def text(self, prompt: str, infill: Infill, quote: Quote) -> SeamedText:
        own, line_end = SeamedText, SeamedText("\n")
        files = [
            part
            for file in infill.files
            for part in (own(self.file), quote(file.name), line_end, quote(file.text), line_end)
        ]
        begin, end = [own(self.prefix), quote(prompt)], [own(self.suffix), quote(infill.suffix)]
        if infill.files:
            begin = [own(self.file), *begin]
        parts = [*end, *begin] if self.suffix_first else [*begin, *end]
        return SeamedText.joined([*files, *parts, own(self.middle), quote(infill.begun)])


_KNOWN = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"),
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    InfillTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    InfillTokens("<PRE>", "<SUF>", "<MID>"),
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),
    InfillTokens(" <PRE>", " <SUF>", " <MID>"),
    InfillTokens("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
)


def infill_text(vocab: Vocab, prompt: str, infill: Infill, quote: Quote) -> SeamedText:
    """Raises InvalidField where the model was not trained to fill in."""
    known = vocab.specials
    for tokens in _KNOWN:
        if tokens.prefix in known and tokens.suffix in known and (not tokens.middle or tokens.middle in known):
            return replace(tokens, file=tokens.file if tokens.file in known else "").text(prompt, infill, quote)
    reason = "this model has no tokens for filling in the middle: put everything into the prompt."
    raise InvalidField(infill.param, reason)
