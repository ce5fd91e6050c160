"""Requests whose answers repeat what is known already, more or less: edits, agents, quotations, records, talk.

All texts are made here, from a seed: equal for equal seeds, with other names, parts and values for others. Small
models do not follow instructions well, so the answers to the first three are begun for them: what they write then
is what a good model would.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

from benchmarks.recorded_sessions import message_text
from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json
from emberkeep.values import dataclass

_THINGS = (
    "apple",
    "lamp",
    "chair",
    "stone",
    "bottle",
    "ticket",
    "parcel",
    "letter",
    "coat",
    "wheel",
    "mirror",
    "drum",
)
_PEOPLE = ("Maelis", "Torvin", "Anouk", "Desta", "Ilario", "Nkechi", "Oswin", "Petra", "Rashid", "Sunniva", "Yara")
_TOWNS = (
    "Aldermoor",
    "Brindle",
    "Corvane",
    "Dunmere",
    "Eskford",
    "Fallow",
    "Garrick",
    "Hollin",
    "Jarrow",
    "Lorne",
)
_JOBS = ("baker", "carpenter", "gardener", "pilot", "teacher", "sailor", "painter", "doctor")
_RENAMED = (("count", "quantity"), ("name", "label"), ("store", "shelf"), ("number", "amount"))
_QUESTIONS = (
    "Why do leaves change their colour in autumn?",
    "How would you explain to a child what money is for?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should one think about before adopting a dog?",
    "Describe a walk through a market in the early morning.",
    "What makes a good teacher?",
    "How does a bicycle stay upright?",
    "Give advice to a person who has to speak in public for the first time.",
    "Why is the sea salty?",
    "Describe what a town might look like in two hundred years.",
)


@dataclass(frozen=True, slots=True)
class Task:
    path: str
    body: Mapping[str, Json]
    """What is asked, without how: no limit, no sampling."""


def edit(random: Random) -> Task:
    """A source file, and the same file with something renamed, as far as the first lines."""
    old, new = random.choice(_RENAMED)
    source = _source(random, old)
    begun = _BEGUN.match(source.replace(old, new))
    assert begun is not None
    return _continuation(
        f"The file books.py:\n\n```python\n{source}```\n\n"
        f"The whole file again, with `{old}` renamed to `{new}` everywhere:\n\n```python\n{begun[0]}"
    )


def agent(random: Random) -> Task:
    """An agent that has mended one method, has looked at the file again, and begins to mend the next one."""
    source = _source(random, "count")
    first, second = random.sample(source.split("\n\n    ")[1:], 2)
    mended = source.replace(first, _logged(first))
    return _continuation(
        f"{_AGENT}\nTASK: {_name(first)} and {_name(second)} do not tell what they do. Write it to the log.\n\n"
        f"THOUGHT: First I look at the file.\nCOMMAND:\nopen books.py\nOBSERVATION:\n{_numbered(source)}\n\n"
        f"THOUGHT: I write the method {_name(first)} again, with a line for the log.\nCOMMAND:\n"
        f"{_replacing(source, first)}\n    {_logged(first).rstrip()}\nend_of_edit\n"
        f"OBSERVATION:\n{_numbered(mended)}\n\n"
        f"THOUGHT: I write the method {_name(second)} again, with a line for the log.\nCOMMAND:\n"
        f"{_replacing(mended, second)}\n    def {_name(second)}"
    )


def quotation(random: Random) -> Task:
    """Passages, and an answer that begins to quote one of them."""
    people = random.sample(_PEOPLE, len(_STORIES))
    stories = random.sample(_STORIES, len(_STORIES))
    passages = [_passage(random, story, one) for story, one in zip(stories, people, strict=True)]
    number = random.randrange(len(passages))
    wanted = passages[number]
    shown = "\n\n".join(f"[{i}] {passage}" for i, passage in enumerate(passages, 1))
    who = wanted.split(" ", 1)[0]
    return _continuation(
        f"Passages:\n\n{shown}\n\nQuestion: What is told about {who}? Quote the whole passage word by word.\n"
        f'Answer: Passage [{number + 1}] says: "{" ".join(wanted.split(" ")[:6])}'
    )


def records(random: Random) -> Task:
    """Sentences to be written as JSON of a given schema."""
    people = random.sample(_PEOPLE, 4)
    lines = [
        f"{name} is {random.randrange(20, 70)} years old, works as a {random.choice(_JOBS)} and lives in "
        f"{random.choice(_TOWNS)}."
        for name in people
    ]
    asked = "Write these people as JSON, one object for each of them:\n" + "\n".join(lines)
    return _chat(asked, response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": _SCHEMA}})


def talk(random: Random) -> Task:
    """Nothing in the prompt helps."""
    return _chat(f"{random.choice(_PEOPLE)} asks: {random.choice(_QUESTIONS)}")


KINDS: dict[str, Callable[[Random], Task]] = {
    "code edit": edit,
    "agent": agent,
    "quotation": quotation,
    "JSON schema": records,
    "open chat": talk,
}


def make_task(kind: str, seed: object) -> Task:
    return KINDS[kind](Random(repr((kind, seed))))


# ── recorded conversations ──

_MOST_CHARACTERS = 10_000
"""Of a recorded conversation: about 3,000 tokens."""


def recorded_tasks(folder: Path) -> list[Task]:
    """One per `*.json` with `messages`: what came before the last answer that is not too far from the beginning.

    Raises EmberkeepError where there is none.
    """
    prompts = [prompt for file in sorted(folder.glob("*.json")) if (prompt := _recorded(file))]
    if not prompts:
        raise EmberkeepError(f"{folder} has no JSON files with `messages` and an answer: choose another --data.")
    return [_continuation(prompt) for prompt in prompts]


def _recorded(file: Path) -> str:
    try:
        messages = json.loads(file.read_text(encoding="utf-8"))["messages"]
        turns = [(str(said["role"]), message_text(said)) for said in messages]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EmberkeepError(f"{file} is not a JSON object with `messages`: {error}.") from error
    text, best = "", ""
    for role, said in turns:
        text += f"### {role}\n"
        if role == "assistant" and len(text) <= _MOST_CHARACTERS:
            best = text
        text += f"{said}\n\n"
    return best


# ── parts of the texts ──

_BEGUN = re.compile(r"(?:.*\n){14}\s*\S+")
"""Up to the first word of a line, where no model stops."""
_AGENT = """You mend programs in a shell. Answer with a THOUGHT and one COMMAND; an OBSERVATION follows.
COMMANDS:
open <path>            shows the file with the numbers of its lines
edit <first>:<last>    replaces these lines with what follows, up to a line with end_of_edit
run <path>             runs the file and shows what it prints
"""
_FIELDS = ("name", "age", "occupation", "town")
_SCHEMA: Json = {
    "type": "array",
    "minItems": 4,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {key: {"type": "integer" if key == "age" else "string"} for key in _FIELDS},
        "required": list(_FIELDS),
        "additionalProperties": False,
    },
}


def _continuation(prompt: str) -> Task:
    return Task("/v1/completions", {"prompt": prompt})


def _chat(question: str, **fields: Json) -> Task:
    return Task("/v1/chat/completions", {"messages": [{"role": "user", "content": question}], **fields})


def _source(random: Random, word: str) -> str:
    thing = random.choice(_THINGS)
    methods = "\n\n    ".join(random.sample(_METHODS, len(_METHODS) - 2))
    text = f"{_CLASS}\n\n    {methods}\n"
    return text.replace("THING", thing).replace("Thing", thing.title()).replace("WORD", word)


def _numbered(source: str) -> str:
    return "\n".join(f"{number}:{line}" for number, line in enumerate(source.splitlines(), 1))


def _name(method: str) -> str:
    return method.removeprefix("def ").split("(", 1)[0]


def _logged(method: str) -> str:
    first, rest = method.split("\n", 1)
    return f'{first}\n        log.debug("{_name(method)}")\n{rest}'


def _replacing(source: str, method: str) -> str:
    """The command that replaces the lines of this method."""
    first = source[: source.index(method)].count("\n") + 1
    return f"edit {first}:{first + len(method.splitlines()) - 1}"


def _passage(random: Random, story: str, one: str) -> str:
    other = random.choice([name for name in _PEOPLE if name != one])
    home, away = random.sample(_TOWNS, 2)
    thing, gift = random.sample(_THINGS, 2)
    names = {"one": one, "other": other, "home": home, "away": away, "thing": thing, "gift": gift}
    return story.format(**names, job=random.choice(_JOBS), year=random.randrange(1700, 1950))


_CLASS = '''"""Every THING that there is, with its WORD."""

import json
from pathlib import Path


class ThingBooks:
    def __init__(self, path: Path, WORD: int = 0) -> None:
        self.path = path
        self.WORD = WORD
        self.items: dict[str, int] = {}'''
_METHODS = (
    """def add(self, key: str, WORD: int) -> None:
        if WORD < 0:
            raise ValueError("the WORD of a THING is not negative")
        self.items[key] = self.items.get(key, 0) + WORD
        self.WORD += WORD""",
    '''def take(self, key: str, WORD: int) -> int:
        """What is left of it; raises KeyError if there was less than that."""
        left = self.items[key] - WORD
        if left < 0:
            raise KeyError(f"{key}: there are only {self.items[key]}")
        self.items[key] = left
        return left''',
    """def save(self) -> None:
        content = {"items": self.items, "WORD": self.WORD}
        self.path.write_text(json.dumps(content, indent=2))""",
    """def load(self) -> None:
        content = json.loads(self.path.read_text())
        self.items = {str(key): int(value) for key, value in content["items"].items()}
        self.WORD = content["WORD"]""",
    '''def largest(self, limit: int = 10) -> list[tuple[str, int]]:
        """Those with the highest WORD, the highest one first."""
        ordered = sorted(self.items.items(), key=lambda item: item[1], reverse=True)
        return ordered[:limit]''',
    """def merge(self, other: "ThingBooks") -> None:
        for key, WORD in other.items.items():
            self.add(key, WORD)
        other.items.clear()""",
    """def report(self) -> str:
        lines = [f"{key:<20}{WORD:>8}" for key, WORD in sorted(self.items.items())]
        lines.append(f"WORD in all: {self.WORD}")
        return "\\n".join(lines)""",
)
_STORIES = (
    "{one} came from {home} to {away} in {year} with nothing but a {thing} under the arm. A {job} called "
    "{other} gave the stranger a room above the mill, and for twelve years the two of them mended whatever the "
    "people of {away} brought, until the river took the bridge and no road led there any more.",
    "{one} is remembered in {home} for the winter of {year}, when the harbour froze. Together with {other}, "
    "the {job}, every {thing} in the town was burnt to keep the children warm, and in spring each family was "
    "given a {gift} from {away} in return, which some of them still have.",
    "{one} never wanted to be a {job}. As a child of nine the youngest of the house walked from {home} to "
    "{away} to see the great {thing} in the hall there, drew it on the back of a letter, and sold the drawing "
    "to {other} in {year} for the price of a {gift}.",
    "{one} and {other} quarrelled in {year} about a {thing} that neither of them had made. The court of {home} "
    "kept it for forty years, lent it to {away} for a wedding, and lost it in the end to a {job} who had come "
    "about something else and took it for a {gift}.",
    "{one} wrote to {other} every week from {home}, and every letter begins with the weather. Only the one of "
    "{year} tells of the fire in {away}: how a {job} carried out a {gift} first, then a {thing}, and then went "
    "back once more for the book in which all of it is told.",
)
