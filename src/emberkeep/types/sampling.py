"""How the next token is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from emberkeep.values import dataclass

DEFAULT_SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. `temperature == 0` is greedy. Names and meanings are llama.cpp's."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    text_bias: tuple[tuple[str, float], ...] = ()
    """The same for every token of a text."""
    ignore_eos: bool = False
    """Nothing that ends a generation is drawn."""
    repeat_last_n: int | None = None
    """Penalties look at so many tokens, those of the prompt included. None: at all of the answer, and no more."""
    dry_multiplier: float = 0.0
    """Above 0: a token that would go on with a repetition is penalised, the more the longer that is."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    top_n_sigma: float = -1.0
    """Above 0: only logits within so many standard deviations of the highest."""
    xtc_probability: float = 0.0
    """How often all but the least likely of the tokens above `xtc_threshold` are left out."""
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    """The temperature is up to so much lower or higher, by how sure the model is."""
    dynatemp_exponent: float = 1.0
    mirostat: Literal[0, 1, 2] = 0
    """1 and 2 take the place of every other sampler but the temperature."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    """Which are used, and in which order."""
    min_keep: int = 0
    """So many tokens at least are left to draw from by top-p, min-p, typical-p and XTC."""

    @property
    def penalises(self) -> bool:
        """Tokens that came before are less likely, or more."""
        return bool(self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0)

    @property
    def uses_dry(self) -> bool:
        return self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_penalty_last_n > 0

    @property
    def uses_xtc(self) -> bool:
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    @property
    def needs_chain(self) -> bool:
        """Whether something is asked for besides bias, penalties on the answer, top-k, typical-p, top-p, min-p and
        temperature in their usual order."""
        return bool(
            self.samplers != DEFAULT_SAMPLERS
            or self.mirostat
            or self.min_keep
            or self.dynatemp_range > 0
            or self.top_n_sigma > 0
            or self.uses_xtc
            or self.uses_dry
            or (self.repeat_last_n is not None and self.penalises)
        )
