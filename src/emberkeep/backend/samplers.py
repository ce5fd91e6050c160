"""The samplers of a request's choices: what its settings mean for the vocabulary of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from emberkeep.chat.output import open_reasoning
from emberkeep.chat.prompt import Prompt
from emberkeep.latest import Latest
from emberkeep.sched.sampler_chain import Breakers, Chain, ChainedSampler, find_breakers
from emberkeep.sched.sampling import Sampler
from emberkeep.types.models import Vocab
from emberkeep.types.request import Request, Sampling
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.chat.grammar import Constraint

_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class Samplers:
    request: Request
    settings: Sampling
    constraint: Constraint | None
    breakers: Breakers
    vocab: Vocab

    def of_choice(self, index: int, prompt: Prompt) -> Sampler:
        request, settings = self.request, self.settings
        if settings.seed is not None:
            settings = replace(settings, seed=settings.seed + index)  # choices of one request draw differently
        reasoning = open_reasoning(prompt.written.tail) if request.prompt is None else None
        matcher = self.constraint.matcher(reasoning) if self.constraint else None
        if not settings.needs_chain and not request.logprobs_as_drawn:
            return Sampler(settings, matcher, request.top_logprobs, request.forced)
        return ChainedSampler(
            Chain(settings, self.vocab, prompt.tokens, self.breakers),
            settings,
            matcher,
            request.top_logprobs,
            request.forced,
            as_drawn=request.logprobs_as_drawn,
        )


class SamplerSource:
    """For one vocabulary; remembers the latest that took long to make. Safe to use from several threads."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._breakers = Latest[tuple[str, ...], Breakers](_REMEMBERED)

    def samplers(self, request: Request, constraint: Constraint | None) -> Samplers:
        """Blocks for tens of milliseconds where a request wants what no other wanted."""
        settings = request.sampling
        breakers = self._find_breakers(settings.dry_sequence_breakers) if settings.uses_dry else {}
        return Samplers(request, self._with_ids(settings), constraint, breakers, self._vocab)

    def _with_ids(self, settings: Sampling) -> Sampling:
        """Replace texts that are biased by their tokens."""
        if not settings.text_bias and not settings.ignore_eos:
            return settings
        bias = dict(settings.logit_bias)
        for text, by in settings.text_bias:
            for token in self._vocab.tokenize(text, parse_special=False):
                bias[token] = bias.get(token, 0.0) + by
        bias |= dict.fromkeys(self._vocab.eog, float("-inf")) if settings.ignore_eos else {}
        return replace(settings, logit_bias=bias)

    def _find_breakers(self, texts: tuple[str, ...]) -> Breakers:
        found = self._breakers.get(texts)
        if found is None:
            found = self._breakers[texts] = find_breakers(texts, self._vocab)
        return found
