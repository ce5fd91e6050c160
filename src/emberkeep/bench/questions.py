"""Questions with passages in which the answers stand: from a file, or made up.

A file is a JSON list of objects with `question`, `answers` (texts of which any is right) and `ctxs`, each of these with
a `text` and perhaps a `title`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

from emberkeep.bench.texts import Words
from emberkeep.errors import EmberkeepError

_NAMES = ["Adara", "Belmin", "Corvo", "Dagny", "Elswin", "Farren", "Gisela", "Hollis", "Ivarin", "Jocasta", "Kerrin", "Lomax", "Mireth", "Noland"]
_THINGS = ["compass", "lantern", "violin", "atlas", "mirror", "ledger", "tapestry", "telescope", "goblet", "manuscript", "sabre", "clock"]
_PLACES = ["Oslo", "Quito", "Dakar", "Perth", "Minsk", "Cusco", "Bergen", "Malaga", "Tunis", "Osaka", "Lisbon", "Nairobi", "Toledo", "Riga"]


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]

    def holds_answer(self, passage: str) -> bool:
        return any(answer.lower() in passage.lower() for answer in self.answers)


def read_questions(path: Path) -> list[Question]:
    """Raises EmberkeepError for a file that does not hold any."""
    try:
        return [_question(one) for one in json.loads(path.read_bytes())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EmberkeepError(
            f"{path} holds no questions ({error}): give a JSON list of objects with question, answers and ctxs."
        ) from error


def _question(one: dict[str, object]) -> Question:
    question, answers, passages = one["question"], one["answers"], one["ctxs"]
    if not (isinstance(question, str) and isinstance(answers, list) and isinstance(passages, list)):
        raise TypeError("an entry has another shape")
    texts = (f"{passage.get('title') or ''}\n{passage['text']}".strip() for passage in passages)
    return Question(question, tuple(str(answer) for answer in answers), tuple(texts))


def made_up_questions(words: Words, count: int, passages: int, tokens: int) -> list[Question]:
    """Each about one of `passages` facts, every one of which stands among about `tokens` tokens of other words."""
    return [_made_up(words, number, passages, tokens) for number in range(count)]


def _made_up(words: Words, number: int, passages: int, tokens: int) -> Question:
    random = Random(number)
    pairs = [(name, thing) for name in _NAMES for thing in _THINGS]
    facts = [(name, thing, random.choice(_PLACES)) for name, thing in random.sample(pairs, passages)]
    texts = [
        f"The {thing} of {name} is kept in {place}. {words.text(tokens, (number, name, thing))}."
        for name, thing, place in facts
    ]
    name, thing, place = random.choice(facts)
    return Question(f"In which city is the {thing} of {name} kept?", (place,), tuple(texts))
