"""Questions with passages in which the answers stand: from a file, or made up.

A file is a JSON list of objects with `question`, `answers` (texts of which any is right) and `ctxs`, each of these
with a `text` and perhaps a `title`.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from emberkeep.bench.workspace import Words
from emberkeep.errors import EmberkeepError

_NAMES = ("Adara", "Belmin", "Corvo", "Dagny", "Elswin", "Farren", "Gisela", "Hollis", "Ivarin", "Kerrin", "Lomax")
_THINGS = ("compass", "lantern", "violin", "atlas", "mirror", "ledger", "tapestry", "telescope", "goblet", "clock")
_PLACES = ("Oslo", "Quito", "Dakar", "Perth", "Minsk", "Bergen", "Malaga", "Tunis", "Osaka", "Lisbon", "Riga")


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]

    def holds_answer(self, passage: str) -> bool:
        return any(answer.lower() in passage.lower() for answer in self.answers)

    def shorten(self, passage: str, tokens: int, tokenize: Callable[[str], Sequence[int]]) -> str:
        """At most so many tokens of a passage: those around the answer where it has one, else the first."""
        words, cut = passage.split(), passage
        count, at = len(words), self._place_of_answer(passage)
        while count > 1 and (length := len(tokenize(cut))) > tokens:
            count = max(min(count * tokens // length, count - 1), 1)
            begin = max(min(at - count // 2, len(words) - count), 0)
            cut = " ".join(words[begin : begin + count])
        return cut

    def _place_of_answer(self, passage: str) -> int:
        """How many words come before it; 0 if there is none."""
        places = (passage.lower().find(answer.lower()) for answer in self.answers)
        return min((len(passage[:place].split()) for place in places if place >= 0), default=0)

    def shuffle(self, seed: int) -> Question:
        """With another passage first, if there is one: what comes first has not moved."""
        passages, random = list(self.passages), Random(seed)
        while len(set(passages)) > 1 and passages[0] == self.passages[0]:
            random.shuffle(passages)
        return replace(self, passages=tuple(passages))


def read_questions(path: Path) -> list[Question]:
    """Raises EmberkeepError for a file that does not hold any."""
    try:
        if questions := [_question(one) for one in json.loads(path.read_bytes())]:
            return questions
        raise ValueError("it is empty")
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


# ── how right an answer is ──

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(text: str, answers: Sequence[str]) -> float:
    """Word overlap with the best of `answers`, normalised as for SQuAD: no case, punctuation or articles."""
    return max(_f1(_words(text), _words(answer)) for answer in answers)


def holds_answer(text: str, answers: Sequence[str]) -> bool:
    """Whether the words of one of `answers` stand in the text one after the other, normalised as for `f1`."""
    said = f" {' '.join(_words(text))} "
    return any(f" {' '.join(_words(answer))} " in said for answer in answers)


def _f1(given: Sequence[str], right: Sequence[str]) -> float:
    if not given or not right:
        return float(given == right)
    common = (Counter(given) & Counter(right)).total()
    return 2 * common / (len(given) + len(right))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
