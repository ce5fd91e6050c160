"""Prompts of a known length that share nothing by accident."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

_COMMON = """
the of and to in a is that for it was on are as with they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some
so these would other into has more her two like him see time could no make than first been its who now
people my made over did down only way find use may water long little very after words called just where most
know get through back much before go good new write our used me man too any day same right look think also
around another came come work three word must because does part even place well such here take why things
help put years different away again off went old number great tell men say small every found still between
name should home big give air line set own under read last never us left end along while might next sound
below saw something thought both few those always looked show large often together asked house world going
want school important until form food keep children feet land side without boy once animals life enough took
sometimes four head above kind began almost live page got earth need far hand high year mother light parts
country father let night following picture being study second eyes soon times story boys since white days
ever paper hard near sentence better best across during today others however sure means knew try told young
miles sun ways thing whole hear example heard several change answer room sea against top turned learn point
city play toward five using himself usually
"""
COMMON = tuple(_COMMON.split())
"""English words, about from the most frequent on."""


class Words:
    """Words with what each costs in a model's tokens, so that lengths can be chosen."""

    def __init__(self, costs: Mapping[str, int]) -> None:
        self._costs = costs
        self._words = list(costs)

    @classmethod
    def of(cls, tokenize: Callable[[str], Sequence[int]]) -> Words:
        return cls({word: len(tokenize(f" {word}")) for word in COMMON})

    @classmethod
    def of_model(cls, path: Path) -> Words:
        """Loads the model for a moment. Raises ModelError."""
        from emberkeep.engine.llamacpp.model import LlamaModel

        model = LlamaModel(path)
        try:
            return cls.of(model.vocab.tokenize)
        finally:
            model.close()

    def text(self, tokens: int, seed: object) -> str:
        """About `tokens` tokens; equal for equal seeds and different from the first words on for others."""
        chosen, random = list[str](), Random(repr(seed))
        while tokens > 0:
            chosen.append(random.choice(self._words))
            tokens -= self._costs[chosen[-1]]
        return " ".join(chosen)
