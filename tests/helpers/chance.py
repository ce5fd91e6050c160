"""Chance in tests: the same seeds and examples in every `make test`; fresh ones, and more, in `make torture`.

EMBERKEEP_TEST_TORTURE makes the difference: a number by which counts are multiplied. The seeds of such a run
follow from one that is printed when it starts; EMBERKEEP_TEST_SEED with that number repeats them. Hypothesis
prints a line with which an example of its own is repeated.
"""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

from hypothesis import HealthCheck, settings, strategies
from hypothesis.internal.conjecture import providers

_TORTURE, _SEED = "EMBERKEEP_TEST_TORTURE", "EMBERKEEP_TEST_SEED"
_EXAMPLES = 100
"""Of a property that does not say how many."""


def is_torture() -> bool:
    return bool(os.environ.get(_TORTURE))


def times(count: int) -> int:
    """How often something is done that is done `count` times in `make test`."""
    return count * int(os.environ.get(_TORTURE) or "1")


def seed(fixed: int = 0) -> int:
    """`fixed` in `make test`; under torture one that is another in each run, and for each `fixed`."""
    return random.Random(f"{os.environ[_SEED]} {fixed}").getrandbits(32) if is_torture() else fixed


def examples(count: int = _EXAMPLES, *allowed: HealthCheck, **more: Any) -> settings:
    """For a property that needs another number of examples than others, or that may do what Hypothesis refuses."""
    return settings(max_examples=times(count), suppress_health_check=[HealthCheck.too_slow, *allowed], **more)


def load_profile() -> str:
    """Set Hypothesis up, and choose the seed of this run, once and before there are workers: they inherit it.
    Returns what a person has to know to repeat it; empty: nothing."""
    usual: dict[str, Any] = {
        "max_examples": times(_EXAMPLES),
        "deadline": None,  # a busy machine is no failure
        "suppress_health_check": [HealthCheck.too_slow],
    }
    settings.register_profile("test", derandomize=True, database=None, **usual)
    settings.register_profile("torture", print_blob=True, **usual)
    settings.load_profile("torture" if is_torture() else "test")
    if not is_torture():
        _forget_constants()
        return ""
    os.environ.setdefault(_SEED, str(random.SystemRandom().getrandbits(32)))
    os.environ.setdefault("PYTEST_TIMEOUT", str(times(600)))  # of one test, which does more
    return f"{_TORTURE}={os.environ[_TORTURE]} {_SEED}={os.environ[_SEED]}"


def learn_characters() -> None:
    """Write the table of characters that a new clone has not: no test has to pay for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not meant to be needed this early
        strategies.text().validate()


def _forget_constants() -> None:
    """Hypothesis also tries constants that it finds in our modules, those that are loaded by then: which examples
    a test gets would depend on the tests before it."""
    vars(providers)["_get_local_constants"] = providers.Constants
